"""Random requests to trioserve and to llama-server, and how their answers differ."""
