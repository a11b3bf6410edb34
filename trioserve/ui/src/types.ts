// The words that all parts of the page share.

export type Role = "system" | "user" | "assistant" | "tool";

/** A file that goes with a message: a text, or a picture, a recording or a video, which are `data`. */
export interface Attachment {
  id: string;
  name: string;
  type: string;
  size: number;
  text: string;
  data?: Blob;
}

/** A part of an attached text, by its characters. */
export interface Part {
  file: string;
  from: number;
  to: number;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** The state of a call of a tool that the server makes. */
export type CallState = "called" | "asked" | "running" | "done" | "failed" | "stopped" | "denied";

/** A call of a tool that the server makes, and what came of it. */
export interface MadeCall extends ToolCall {
  /** The tool's name for people. */
  title: string;
  /** It may change something. */
  writes: boolean;
  state: CallState;
  /** The change that it would make, as a unified diff, for the person who is asked. */
  preview?: string;
  /** The last of what it has written while it runs. */
  output?: string;
  /** The messages for the model. */
  result?: string;
  /** The change that it has made, as a unified diff. */
  diff?: string;
  seconds?: number;
}

/** A model's text before the last text of an answer, and the calls that the server then made. */
export interface Step {
  content: string;
  reasoning: string;
  calls: MadeCall[];
}

export interface Stats {
  tokens: number;
  tokensPerSecond: number;
  /** Milliseconds from sending to the first token. */
  ttft: number;
  promptTokens: number;
  cachedTokens: number;
  contextUsed: number;
  /** 0: the server has not said. */
  contextSize: number;
}

/** A token of an answer, and those that were likely in its place. */
export interface TokenOdds {
  text: string;
  probability: number;
  others: { text: string; probability: number }[];
}

export type MessageState = "done" | "writing" | "stopped" | "failed";

/** The source of an answer while it is written: its text is that of the bytes up to `offset`. */
export interface StreamPlace {
  conversation: string;
  offset: number;
  /** When it was asked for: milliseconds, as Date.now(). */
  startedAt: number;
  /** Milliseconds from there to the first token, once it came. */
  ttft?: number;
  /** The answer's id at the server. */
  id?: string;
  /** The last of the steps may get more calls. */
  isCalling?: boolean;
}

export interface Message {
  id: string;
  chat: string;
  parent: string | null;
  role: Role;
  content: string;
  reasoning: string;
  /** Calls that the server did not make. */
  toolCalls: ToolCall[];
  /** The steps before the content, if the server made calls for the model. */
  steps?: Step[];
  attachments: Attachment[];
  /** Of documents that are too long, here or in earlier messages: what of them is sent with this one. */
  parts?: Part[];
  model: string;
  createdAt: number;
  state: MessageState;
  /** Why the model ended: stop, length, tool_calls; or max_steps. */
  finish?: string;
  /** The error, in words for people. */
  error?: string;
  /** It failed because the chat does not fit into the context. */
  full?: boolean;
  stats?: Stats;
  /** Set if the request asked for them. */
  odds?: TokenOdds[];
  stream?: StreamPlace;
}

export interface Chat {
  id: string;
  title: string;
  createdAt: number;
  updatedAt: number;
  /** The last message of the branch that is shown. */
  leaf: string | null;
  /** Empty, or without an entry: what the settings say. */
  system: string;
  sampling: Sampling;
  model: string;
  /** Not there: what the settings say. */
  tools?: ToolChoice;
  /** It stays at the top of the list. */
  pinned?: boolean;
  /** Its title is the beginning of its first message, until the model has written one. */
  untitled?: boolean;
  /** Once the context was full: the first message that the model gets, and the summary of those before. */
  start?: ChatStart;
}

export interface ChatStart {
  message: string;
  summary: string;
  /** When that was: what was counted before no longer holds. */
  since: number;
}

/** The tools that the model may call. */
export interface ToolChoice {
  on: string[];
  /** Those that write without a person being asked each time. */
  allowed: string[];
  /** The folder that relative paths begin in; empty: the server's own. */
  cwd: string;
}

/** Only what differs from the server's defaults, by the names of the API's fields. */
export type Sampling = Record<string, number | string | boolean | string[]>;

export interface Preset {
  id: string;
  name: string;
  system: string;
  sampling: Sampling;
}

export interface Settings {
  apiKey: string;
  theme: "auto" | "light" | "dark";
  language: "auto" | "en" | "de" | "zh";
  sendKey: "enter" | "mod-enter";
  system: string;
  sampling: Sampling;
  model: string;
  tools: ToolChoice;
  showReasoning: boolean;
  showStats: boolean;
  /** The page’s own MCP servers. */
  mcp: McpEntry[];
  /** True if the model writes the titles of chats. */
  titles: boolean;
  /** True if a button takes dictation; the browser may send the sound to its maker. */
  dictation: boolean;
  /** True if each answer is read aloud while it is written. */
  readAll: boolean;
  /** The server's voice that reads; empty: the default. */
  voice: string;
  /** 1: as fast as the voice speaks by itself. */
  readSpeed: number;
}

/** An MCP server that a person has added to the page. */
export interface McpEntry {
  id: string;
  name: string;
  url: string;
  /** For the header Authorization; empty: it needs none. */
  token: string;
}

export type Phase =
  | "sending"
  | "loading-model"
  | "queued"
  | "prompt"
  | "thinking"
  | "writing"
  | "running-tools"
  | "asking"
  | "reconnecting";

/** An answer that is being written. */
export interface Run {
  chat: string;
  message: string;
  phase: Phase;
  /** In the queue; 1 is the next. */
  place?: { position: number; waitS?: number };
  /** Tokens of the prompt. */
  progress?: { done: number; total: number; cached: number };
  tokensPerSecond?: number;
  startedAt: number;
  /** A further note, such as how much of the model is loaded. */
  note?: string;
}

export type ServerState =
  | "connecting"
  | "loading"
  | "ready"
  | "sleeping"
  | "draining"
  | "full"
  | "needs-key"
  | "unreachable";

export interface ServerStatus {
  state: ServerState;
  /** A sentence for people; empty when all is well. */
  message: string;
  /** When the page will try again by itself: milliseconds, as Date.now(). */
  retryAt?: number;
}

/** The kinds of binary files. */
export type MediaKind = "image" | "audio" | "video";

/** The server's /props, as far as the page reads them. */
export interface Props {
  role?: "router";
  default_generation_settings: { params: Record<string, unknown>; n_ctx: number };
  total_slots?: number;
  model_alias?: string;
  model_path?: string;
  modalities?: Record<string, boolean>;
  chat_template_caps?: Record<string, boolean>;
  endpoint_chat?: boolean;
  endpoint_embeddings?: boolean;
  endpoint_slots?: boolean;
  endpoint_metrics?: boolean;
  endpoint_speech?: boolean;
  endpoint_tools?: boolean;
  cors_proxy_enabled?: boolean;
  priority_order?: "higher-first" | "lower-first";
  takes_pdf?: boolean;
  ui_settings?: Record<string, unknown>;
  build_info?: string;
  is_sleeping?: boolean;
}

/** A tool that the server can run. */
export interface ServerTool {
  name: string;
  /** For people. */
  title: string;
  description: string;
  /** The MCP server that it comes from; empty: it is built in. */
  origin: string;
  writes: boolean;
}

export interface Model {
  id: string;
  aliases: string[];
  /** Of a router's models: unloaded, downloading, loading, loaded, sleeping. Else: loaded. */
  status: string;
  failed: boolean;
  /** The share that is loaded or downloaded, while that lasts. */
  progress?: number;
  /** Of a download: the bytes that are here, and all. */
  bytes?: { done: number; total: number };
  /** 0: not known. */
  contextSize: number;
  parameters: number;
  size: number;
  /** The media that it takes beside text. */
  takes: string[];
  /** It was downloaded, and can be deleted. */
  removable: boolean;
  /** It is there to try the server with. */
  toy: boolean;
  /** Questions that a toy can answer. */
  examples: string[];
  /** Its file says how a chat is written for it; undefined: not known yet. */
  hasTemplate?: boolean;
  /** The limit of a request's length, and its reason; empty: no limit to show. */
  advice: string;
}

export interface SlotView {
  id: number;
  model: string;
  state: "idle" | "prefill" | "decode";
  /** Its reader is too slow. */
  paused: boolean;
  contextSize: number;
  promptTokens: number;
  /** Of these, those that are computed or were cached. */
  promptDone: number;
  cachedTokens: number;
  decoded: number;
  tokensPerSecond: number;
}

export interface QueuedView {
  id: number;
  model: string;
  position: number;
  promptTokens: number;
  priority: number;
  waitedS: number;
  waitS: number | null;
}

export interface Kept {
  bytes: number;
  found: number;
}

/** A look at what the server does. What it does not tell is null. */
export interface Activity {
  at: number;
  slots: SlotView[] | null;
  queue: QueuedView[] | null;
  /** Cells of the KV cache. */
  cache: { used: number; total: number } | null;
  /** The places of kept prompts: bytes, and tokens of later prompts that were found there. */
  kept: { kv: Kept; ram: Kept; disk: Kept } | null;
  /** Since the server's start. */
  totals: { promptTokens: number; cachedTokens: number; tokens: number } | null;
  /** Tokens of drafts by type, since the server's start; empty without drafts. */
  drafts: { type: string; tokens: number; accepted: number }[];
  /** Of all slots together. */
  tokensPerSecond: number;
  /** Why something is null, in sentences. */
  missing: string[];
}

/** The state of storage: chats are kept, in memory only, or storage is full. */
export type StorageStatus = "kept" | "memory" | "full";

/** The operations within a transaction. Await nothing else in it, or it ends. */
export interface Transaction {
  chats(): Promise<Chat[]>;
  chat(id: string): Promise<Chat | undefined>;
  putChat(chat: Chat): Promise<unknown>;
  deleteChat(id: string): Promise<unknown>;
  message(id: string): Promise<Message | undefined>;
  messagesOf(chat: string): Promise<Message[]>;
  /** A part of all messages, by their ids: those after `after`. */
  messagesAfter(after: string, count: number): Promise<Message[]>;
  /** The messages that are being written, as far as the database knows. */
  writing(): Promise<Message[]>;
  putMessage(message: Message): Promise<unknown>;
  deleteMessage(id: string): Promise<unknown>;
}
