"""The format of a model: its family's, or one derived from renders of its template."""
