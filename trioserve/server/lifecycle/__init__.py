"""How a server's model is loaded, watched over, put to sleep and woken."""
