"""The tools of the web: `web_search` and `web_fetch`, which read what strangers write.

`engines` asks a search engine and `pages` reads pages. `scope` says what a request allows of both,
and `tools` offers them to a model.
"""
