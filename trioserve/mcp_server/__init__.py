"""`trioserve mcp`: an MCP server on standard input and output that offers models to other programs.

`models` sends requests to the models: those of a server that runs, or those that the command line
names, each in a separate process. `serving` has what programs may call, and the protocol by the
official SDK; `stdio` reads and writes its messages.
"""
