"""`edgekv serve`: an HTTP server that speaks OpenAI's and Anthropic's protocols.

The protocols (`chat`, `completions`, `responses`, `anthropic`, `native`) make a `Request` of what a
client says. It becomes a `Job` of the `worker`, the one thread that uses the model, which answers
jobs in turns and sends `events`. A `Reply` tells thoughts, tool calls and text apart, and the
protocol writes them down. docs/architecture.md walks one request through the files.
"""
