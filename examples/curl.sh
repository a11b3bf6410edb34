#!/bin/sh
# Every kind of route, with curl. Start the server first: make serve
# Usage: examples/curl.sh [http://127.0.0.1:8080]
set -eu
base=${1:-http://127.0.0.1:8080}
json='Content-Type: application/json'

post() { # post PATH BODY
    printf '\n\n== POST %s\n' "$1"
    curl --silent --show-error --no-buffer --fail-with-body -H "$json" "$base$1" -d "$2"
}

get() { # get PATH
    printf '\n\n== GET %s\n' "$1"
    curl --silent --show-error --fail-with-body "$base$1"
}

get /health
get /v1/models
get /slots
get '/slots?queue=1'

# OpenAI's chat, whole and as a stream. Press Ctrl-C in the middle of it: the slot is free at once.
post /v1/chat/completions '{"messages": [{"role": "user", "content": "Say hello"}], "temperature": 0}'
post /v1/chat/completions '{
    "messages": [{"role": "user", "content": "Count from 1 to 10"}],
    "stream": true, "stream_options": {"include_usage": true}, "temperature": 0}'

# A request that matters more than others, and has 10 seconds from its arrival.
post /v1/chat/completions '{
    "messages": [{"role": "user", "content": "Say hello"}], "priority": 5, "timeout": 10}'

# A message that was begun: the model goes on with it.
post /v1/chat/completions '{
    "messages": [{"role": "user", "content": "Name a colour"},
                 {"role": "assistant", "content": "My favourite colour is"}], "max_tokens": 8}'

# OpenAI's text completion, and llama-server's own.
post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 16}'
post /completion '{"prompt": "Once upon a time", "n_predict": 16, "response_fields": ["content", "timings"]}'

# Tokens, and the chat template without a model behind it.
post /tokenize '{"content": "Hello, world", "with_pieces": true}'
post /detokenize '{"tokens": [300, 301]}'
post /apply-template '{"messages": [{"role": "user", "content": "Hi"}]}'

# What a browser's EventSource does: the stream is read from its Location, now or later.
printf '\n\n== POST /v1/chat/completions with Prefer: respond-async\n'
location=$(curl --silent --show-error --fail-with-body -H "$json" -H 'Prefer: respond-async' \
    "$base/v1/chat/completions" -d '{"messages": [{"role": "user", "content": "Say hello"}]}' |
    sed 's/.*"location":"\([^"]*\)".*/\1/')
get "$location"

# A stream with a name: read on from an offset, found again, stopped.
printf '\n\n== POST /v1/chat/completions with X-Conversation-Id\n'
curl --silent --show-error --fail-with-body -H "$json" -H 'X-Conversation-Id: one' \
    "$base/v1/chat/completions" \
    -d '{"messages": [{"role": "user", "content": "Say hello"}], "stream": true, "max_tokens": 4}'
get '/v1/stream?conv_id=one&from=0'
post /v1/streams/lookup '{"conversation_ids": ["one", "two"]}'
curl --silent --show-error --fail-with-body --request DELETE "$base/v1/stream?conv_id=one"
echo
