"""Transcription of recordings, by the loaded model in windows or by Whisper in a child process."""
