"""The process of a model: it runs a `Server`, and an app asks it over frames.

`messages` has what the two say, `serving` is the side of the process, `server` that of the app.
"""
