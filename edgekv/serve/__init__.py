"""`edgekv serve`: an HTTP server that speaks OpenAI's and Anthropic's protocols.

A request becomes a `wish.Wish` (protocols: `chat`, `completions`, `responses`, `anthropic`). The
`worker`, the one thread that uses the model, answers wishes in turns and sends `events`. `reply`
tells thoughts, tool calls and text apart, and the protocol writes them down.
"""
