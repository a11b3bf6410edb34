// Chats and messages for tests.

import type { Chat, Message } from "../types";

export function messageFor(fields: Partial<Message>): Message {
  return {
    id: "m",
    chat: "c",
    parent: null,
    role: "user",
    content: "",
    reasoning: "",
    toolCalls: [],
    attachments: [],
    model: "",
    createdAt: 1,
    state: "done",
    ...fields,
  };
}

export function chatFor(fields: Partial<Chat>): Chat {
  return {
    id: "c",
    title: "A chat",
    createdAt: 1,
    updatedAt: 1,
    leaf: null,
    system: "",
    sampling: {},
    model: "",
    ...fields,
  };
}
