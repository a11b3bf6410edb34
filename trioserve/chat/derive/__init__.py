"""The format of a model: that of its family, or one derived from renders of its template."""
