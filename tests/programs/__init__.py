"""Programs that people use with a server, run against one: agents, SDKs and frameworks."""
