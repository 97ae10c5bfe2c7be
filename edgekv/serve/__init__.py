"""`edgekv serve`: an HTTP server that speaks OpenAI's and Anthropic's protocols.

A request becomes a `Request` (protocols: `chat`, `completions`, `responses`, `anthropic`). The
`worker`, the one thread that uses the model, answers them in turns and sends `events`. `reply`
tells thoughts, tool calls and text apart, and the protocol writes them down.
"""
