"""Images, sound and video of clients: recognized, and decoded under limits in another process.

A server has `sniff` say what a file is, and `decoder` have it decoded by a process that runs
`child`: that is where `images`, `sound` and `video` are. What goes between the two is in `pipe`,
and `answer` checks what comes back. Nothing is imported here, so that the process has no more of
the package than it needs.
"""
