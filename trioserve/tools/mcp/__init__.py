"""The tools of MCP servers: programs that speak on standard input and output, and addresses.

`entries` reads which ones there are. `stdio` and `http` connect to one, `session` speaks the
protocol by the official SDK, `server` starts and stops it as calls need it, and `tools` makes a
`Tool` of each tool that it lists.
"""
