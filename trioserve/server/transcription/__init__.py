"""Recordings become text: by the loaded model, window by window, or by Whisper in a child."""
