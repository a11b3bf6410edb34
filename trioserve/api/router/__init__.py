"""What an app with the models of a router has in place of one with one model.

An unknown path is a 404, and loads no model.
"""
