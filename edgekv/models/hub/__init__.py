"""Files of Hugging Face's, downloaded because the user named them. Nothing else is ever fetched.

`wanted` reads names, `remote` asks the server, `transfer` fetches a file. The packages that these
need are imported where they are used.
"""
