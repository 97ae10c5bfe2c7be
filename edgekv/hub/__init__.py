"""Downloads from Hugging Face, or from what HF_ENDPOINT names, where a user asks for one.

`repository` asks what a repository holds, `files` fetches one file, `models` a model into Hugging
Face's cache, where `edgekv.models_found` finds it. Needs the extra `hub`, and imports it only when
something is fetched.
"""
