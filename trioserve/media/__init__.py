"""Images, sound and video of clients: recognized, and decoded under limits in another process.

`files` says what a file is, and `process` has it decoded by a process that runs `child`, whose
decoders are in `decode`. What goes between the two is in `pipe`. Nothing is imported here, so that
the process has no more of the package than it needs.
"""
