"""Images, sound and video of clients: recognized, and decoded under limits in another process.

`process` has a file decoded by a process that runs `child`, whose decoders are in `decode`. What
the two agree on is in `orders`: which files, and what goes between them. Nothing is imported here,
so that the process has no more of the package than it needs.
"""
