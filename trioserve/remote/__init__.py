"""`RemoteServer`: another server over HTTP, with the one client for that (`ServerClient`)."""
