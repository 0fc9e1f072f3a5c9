// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// What package console answers, as its types say in Go.

export type Hold = { reason: string; detail: string; until_seconds: number; cleared_by: string };

export type Breaker = {
  name: string;
  state: string;
  cause?: string;
  forced: boolean;
  fleet: boolean;
  since_seconds: number;
  until_seconds: number;
  failure_ratio: number;
};

export type Source = {
  name: string;
  group: string;
  state: string;
  holds: Hold[];
  breaker: Breaker;
  storm: { active: boolean; error_rate: number; attempts: number; age_seconds: number };
  waiting: number;
  processing: number;
  settling: number;
  held: number;
  spilled: number;
  retry_wait: number;
  window: number;
  room: number;
  received: number;
  acked: number;
  failures: number;
  dead_lettered: number;
  returned: number;
  quarantined: number;
  credits: number;
  oldest_age_seconds: number;
  errors?: { cause: string; title: string; class: string; messages: number; attempts: number }[];
};

// Seen is a source, and when this page heard of it: times go on from there.
export type Seen = Source & { at: number };

export type Status = {
  process: string;
  at: string;
  fleet: boolean;
  sources: number;
  held: number;
  storms: number;
  paused: number;
  breakers: number;
  unsettled: number;
  dead_lettered: number;
  attention: (Hold & { source: string })[];
};

export type Change = { status: Status; sources: Source[]; gone?: string[] };
export type History = { every_seconds: number; now: string; rows: { source: string; cells: string }[] };
export type NodeKind = "producer" | "topic" | "group" | "dependency";
export type Node = { kind: NodeKind; name: string };
export type Flow = { from: Node; to: Node; count: number; failed: number; sources: number; held: number };
export type Rule = { rule: string; by?: string; why?: string; at: string; until: string };
export type Result = { source: string; before: string; after: string; count?: number; error?: string };
export type Entry = { at: string; who: string; order: string; why?: string; results?: Result[]; fleet?: string; error?: string };
export type Cause = {
  cause: string;
  title: string;
  class: string;
  count: number;
  reasons: Record<string, number>;
  sources: string[];
  first: string;
  last: string;
};
export type Event = {
  at: string;
  kind: string;
  subject: string;
  detail?: string;
  lasted_seconds?: number;
  count?: number;
  until?: string;
};

// clipped is a text of at most so many bytes.
export function clipped(text: string, bytes: number): string {
  let t = text;
  while (new TextEncoder().encode(t).length > bytes) t = t.slice(0, -1);
  return t;
}

// mostWhy is how many bytes the reason of an order may have, and mostRuleWhy that of a rule.
export const mostWhy = 256;
export const mostRuleWhy = 128;

export type Order = {
  action: "pause" | "resume" | "open" | "close" | "release" | "credits" | "deadletter";
  sources?: string[];
  breakers?: string[];
  in?: string;
  for?: string;
  count?: number;
  why?: string;
};

export type Outcome = {
  process: string;
  results: Result[];
  processes?: { process: string; sources: number; count?: number; error?: string }[];
  silent?: string[];
};

// What package fleet answers below fleet/, as far as it is shown.

export type Limit = { rate: number; burst: number };
export type Member = {
  name: string;
  zone?: string;
  state: string;
  heard_ns: number;
  weight: number;
  applied: number;
  share: number;
  level: number;
  cap: number;
  sync_delay_ns: number;
  keys?: { key: string; admitted: number; denied: number }[];
};
export type FleetStatus = {
  members: Member[];
  configuration: { number: number; limit: Limit; limits?: Record<string, Limit>; settled: boolean; away?: string; problem?: string };
  scopes?: { name: string; state: string; cause?: string; held: boolean }[];
};
export type JournalEntry = { at: string; by: string; kind: string; number?: number; subject?: string; text?: string };

// Refused is an answer that is no success. status 0 is no answer.
export class Refused extends Error {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

// The token stays in this tab and goes with it.
const tokenKey = "stormguard-token";
export const setToken = (token: string) => sessionStorage.setItem(tokenKey, token.trim());
export const hasToken = () => Boolean(sessionStorage.getItem(tokenKey));

async function request(path: string, init: RequestInit): Promise<Response> {
  const headers = new Headers(init.headers);
  const token = sessionStorage.getItem(tokenKey);
  if (token) {
    try {
      headers.set("Authorization", "Bearer " + token);
    } catch {
      throw new Refused(401, "no header can carry that token");
    }
  }
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, headers });
  } catch (e) {
    throw new Refused(0, String(e));
  }
  if (!answer.ok) {
    const text = await answer.text();
    let said = text;
    try {
      said = (JSON.parse(text) as { error: string }).error;
    } catch {
      // a proxy's own page
    }
    throw new Refused(answer.status, said || answer.statusText);
  }
  return answer;
}

export async function get<T>(path: string): Promise<T> {
  return (await request(path, {})).json() as Promise<T>;
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  const init = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await request(path, init)).json() as Promise<T>;
}

const silence = 5000; // the console sends each second

// watch calls back with each change until stop aborts it, and throws when the console is
// gone or says nothing. EventSource cannot send a token, so this reads the stream itself.
export async function watch(stop: AbortSignal, changed: (c: Change) => void): Promise<void> {
  const answer = await request("watch", { signal: stop });
  const stream = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const timer = setTimeout(() => void stream.cancel(), silence);
    const { done, value } = await stream.read();
    clearTimeout(timer);
    if (done) {
      throw new Refused(0, "nothing comes from it");
    }
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const event = text.slice(0, end);
      text = text.slice(end + 2);
      if (event.startsWith("data: ")) {
        changed(JSON.parse(event.slice(6)) as Change);
      }
    }
  }
}
