"""Tools that the server runs for a model: built-in ones, MCP servers, and functions of a program.

A `Tool` has a name, a description and parameters, and is called with arguments. `registry` has
all that a configuration allows. `builtin` reads and writes files and runs commands, here or in a
`runtime`, a container or another host; `process` starts programs and ends them with all that they
have started. `mcp` has the tools of MCP servers, and `functions` makes one of a Python function.
`sandbox` keeps paths inside the directories of the tools, and `files` has what is done there.
"""
