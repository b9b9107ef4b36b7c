// A client of Latchwork's HTTP API: locks, claims, tasks and workers. One file; it needs `fetch` and Web Crypto, so it
// runs in Node 18 and newer, Deno, Bun and browsers. Its types are in latchwork.d.ts.
//
// Every call that changes something carries an `Idempotency-Key`, so it is repeated safely when a connection breaks.

// Node 18 has Web Crypto in a module only.
const crypto = globalThis.crypto ?? (await import("node:crypto")).webcrypto;

/** The longest wait of one request, in milliseconds. A longer wait is several requests. */
const LONGEST_WAIT = 30_000;

/** An answer that is no success. */
export class Problem extends Error {
  constructor(status, fields) {
    super(`${status} ${fields.code ?? ""}: ${fields.detail ?? fields.title ?? "no detail"}`);
    this.name = "Problem";
    this.status = status;
    this.code = String(fields.code ?? "");
    this.fields = fields;
  }
}

/** The server did not answer within the client's patience. */
export class Unreachable extends Error {
  constructor(message, cause) {
    super(message, { cause });
    this.name = "Unreachable";
  }
}

/** The session ended before its lock was released. */
export class LockLost extends Error {
  constructor(lock) {
    super(`lock ${JSON.stringify(lock)} was lost`);
    this.name = "LockLost";
  }
}

/** The time of a wait is up. */
export class TimedOut extends Error {
  constructor(message) {
    super(message);
    this.name = "TimedOut";
  }
}

/** Thrown by the code of a worker: the attempt has failed, in these words. */
export class Failed extends Error {
  constructor(message, { code, details, retryable = true, pauseMs } = {}) {
    super(message);
    this.name = "Failed";
    Object.assign(this, { code, details, retryable, pauseMs });
  }
}

export class Latchwork {
  #base;
  #token;
  #patienceMs;

  constructor(url = "http://127.0.0.1:7420", { token, namespace, patienceMs = 30_000 } = {}) {
    const prefix = namespace === undefined ? "/v1" : `/v1/ns/${encoded(namespace)}`;
    this.#base = url.replace(/\/+$/, "") + prefix;
    this.#token = token;
    this.#patienceMs = patienceMs;
  }

  async request(method, path, options = {}) {
    return (await this.#send(method, path, options)).body;
  }

  async #send(method, path, options = {}) {
    const { body, query, headers, key, keyed = true, takesMs = 0, patienceMs = this.#patienceMs } = options;
    const url = this.#base + path + (query ? `?${new URLSearchParams(query)}` : "");
    const sent = { accept: "application/json", ...headers };
    if (this.#token !== undefined) sent.authorization = `Bearer ${this.#token}`;
    if (body !== undefined) sent["content-type"] = "application/json";
    if (keyed && method !== "GET" && method !== "HEAD") sent["idempotency-key"] = key ?? crypto.randomUUID();
    const text = body === undefined ? undefined : JSON.stringify(body);
    const until = performance.now() + patienceMs + takesMs;
    for (let attempt = 1; ; attempt += 1) {
      let pause = Math.min(5000, 100 * 2 ** attempt) * (0.5 + Math.random() / 2);
      let cause;
      try {
        const limit = Math.max(100, Math.min(takesMs + 15_000, until - performance.now()));
        // A redirect would carry the token elsewhere.
        const asked = { method, headers: sent, body: text, redirect: "error", signal: AbortSignal.timeout(limit) };
        const answer = await fetch(url, asked);
        const told = await answer.text();
        if (answer.ok) return { status: answer.status, body: told === "" ? null : JSON.parse(told) };
        cause = new Problem(answer.status, fieldsOf(told));
        if (!isTemporary(cause)) throw cause;
        pause = Math.max(pause, 1000 * (Number(answer.headers.get("retry-after")) || 0));
      } catch (error) {
        if (error instanceof Problem) throw error;
        cause = new Unreachable(`${method} ${path}: ${error.cause?.message ?? error.message}`, error);
      }
      if (performance.now() + pause > until) throw cause;
      await sleep(pause);
    }
  }

  /** Holds a lock while the function runs, and renews it. */
  async lock(name, { waitMs, leaseMs = 30_000, ...mode }, work) {
    const asked = performance.now();
    const session = (await this.request("POST", "/sessions", { body: { lease: duration(leaseMs) } })).id;
    const lost = new AbortController();
    const renewal = this.#renew(session, name, leaseMs, asked, lost);
    try {
      const token = await this.#acquire(session, name, waitMs, mode);
      const done = await work({ name, token, lost: lost.signal, check: () => lost.signal.throwIfAborted() });
      lost.signal.throwIfAborted();
      return done;
    } finally {
      renewal.stop();
      // If this fails, the session ends with its lease.
      await this.request("DELETE", `/sessions/${session}`).catch(() => {});
    }
  }

  async #acquire(session, name, waitMs, mode) {
    const until = waitMs === undefined ? Infinity : performance.now() + waitMs;
    const body = { session, request: crypto.randomUUID(), ...mode };
    for (;;) {
      const takesMs = left(until);
      const query = { wait: duration(takesMs) };
      let standing;
      try {
        standing = await this.request("POST", `/locks/${encoded(name)}/acquire`, { body, query, takesMs });
      } catch (error) {
        if (error instanceof Problem && error.code === "session-lost") throw new LockLost(name);
        throw error;
      }
      if (standing.granted) return standing.token;
      if (performance.now() >= until) throw new TimedOut(`lock ${JSON.stringify(name)} is held`);
    }
  }

  #renew(session, name, leaseMs, confirmed, lost) {
    let deadline = confirmed + leaseMs;
    return every(leaseMs / 3, async () => {
      const asked = performance.now();
      try {
        const patienceMs = Math.max(100, deadline - asked);
        await this.request("POST", `/sessions/${session}/renew`, { patienceMs });
        deadline = asked + leaseMs;
      } catch (error) {
        if (error instanceof Problem && error.code === "session-lost") lost.abort(new LockLost(name));
      }
      // No answer has confirmed the lease for its whole length.
      if (performance.now() >= deadline) lost.abort(new LockLost(name));
    });
  }

  /** Fires a step of a claim workflow, and waits for its action. */
  async fire(workflow, step, entity, { input, requester, actor, key = crypto.randomUUID(), waitMs = 300_000 } = {}) {
    const until = performance.now() + waitMs;
    const body = { workflow, step, input, requester, actor };
    for (;;) {
      const takesMs = left(until);
      const query = { wait: duration(takesMs) };
      const fired = await this.#send("POST", `/claims/${encoded(entity)}/fire`, { body, query, key, takesMs });
      if (fired.status !== 202) return fired.body;
      if (performance.now() >= until) throw new TimedOut(`the action still runs; ask again under the same key ${key}`);
      await sleep(200);
    }
  }

  /** Puts a task, once for each id. */
  putTask(kind, input, options = {}) {
    return this.request("POST", "/tasks", { body: { kind, input: input ?? null, ...options } });
  }

  /** Shows a task, and waits at most so long for its end. */
  async task(id, { waitMs = 0 } = {}) {
    const until = performance.now() + waitMs;
    for (;;) {
      const takesMs = left(until);
      const query = waitMs > 0 ? { wait: duration(takesMs) } : undefined;
      const task = await this.request("GET", `/tasks/${encoded(id)}`, { query, takesMs });
      if (!["open", "leased"].includes(task.state) || performance.now() >= until) return task;
    }
  }

  /** A worker that does tasks: a function for each kind. */
  worker(handlers, options = {}) {
    return new Worker(this, handlers, options);
  }
}

/** Takes tasks by long poll, and does them. A heartbeat keeps the lease of each. */
export class Worker {
  #server;
  #handlers;
  #options;
  #stopping = false;

  constructor(server, handlers, { leaseMs = 30_000, concurrency = 1, name } = {}) {
    this.#server = server;
    this.#handlers = new Map(Object.entries(handlers));
    this.#options = { leaseMs, concurrency, name };
  }

  /** Takes no more tasks. `run` returns when those that were taken are done. */
  stop() {
    this.#stopping = true;
  }

  /** Works until `stop` is called. */
  async run() {
    await Promise.all(Array.from({ length: this.#options.concurrency }, () => this.#loop()));
  }

  async #loop() {
    const { leaseMs, name: worker } = this.#options;
    const body = { kinds: [...this.#handlers.keys()].sort(), lease: duration(leaseMs), worker };
    while (!this.#stopping) {
      let taken;
      try {
        // Short enough to notice that it shall stop. Without a key, the wait ends with its connection: a worker that
        // dies must not get another task.
        const options = { body, query: { wait: "5s" }, takesMs: 5000, keyed: false };
        taken = await this.#server.request("POST", "/tasks:take", options);
      } catch (error) {
        if (error instanceof Problem && !isTemporary(error)) throw error;
        continue;
      }
      for (const task of taken.tasks) await this.#do(task);
    }
  }

  async #do(task) {
    const path = `/tasks/${encoded(task.id)}`;
    const { token } = task;
    const lost = new AbortController();
    const patienceMs = this.#options.leaseMs / 3;
    const beats = every(patienceMs, async () => {
      try {
        await this.#server.request("POST", `${path}/heartbeat`, { body: { token }, patienceMs });
      } catch (error) {
        if (isLost(error)) lost.abort(error);
      }
    });
    let told;
    try {
      told = ["complete", { token, output: (await this.#handlers.get(task.kind)(task, lost.signal)) ?? null }];
      JSON.stringify(told);
    } catch (error) {
      const { message, code, details, retryable, pauseMs } = error instanceof Failed ? error : failed(error);
      const pause = pauseMs === undefined ? undefined : duration(pauseMs);
      told = ["fail", { token, message, code, details, retryable, pause }];
    } finally {
      beats.stop();
    }
    const tell = (verb, body) => this.#server.request("POST", `${path}/${verb}`, { body });
    // Another worker has it, or will get it when the lease is over: what was done here does not count.
    const isOver = (error) => isLost(error) || error instanceof Unreachable || isTemporary(error);
    try {
      await tell(...told).catch((error) => {
        if (told[0] === "fail" || isOver(error)) throw error;
        // The result is too large, for example. Another attempt would have the same.
        return tell("fail", { token, message: error.message, code: error.code, retryable: false });
      });
    } catch (error) {
      if (!isOver(error)) throw error;
    }
  }
}

/** Checks that a call of an endpoint comes from the server (Standard Webhooks). Throws otherwise. */
export async function verify(body, headers, secret, { toleranceMs = 300_000 } = {}) {
  const given = new Headers(headers);
  const [id, sent] = [given.get("webhook-id"), given.get("webhook-timestamp")];
  const signatures = given.get("webhook-signature")?.split(" ") ?? [];
  if (!id || !/^\d+$/.test(sent ?? "")) throw new Error("the call is not signed");
  const age = Date.now() - 1000 * Number(sent);
  if (Math.abs(age) > toleranceMs) throw new Error("the call is too old, or from the future");
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const kind = { name: "HMAC", hash: "SHA-256" };
  const key = await crypto.subtle.importKey("raw", bytes(secret.replace(/^whsec_/, "")), kind, false, ["verify"]);
  const signed = new TextEncoder().encode(`${id}.${sent}.${body}`);
  for (const signature of signatures.filter((text) => /^v1,[A-Za-z0-9+/]+=*$/.test(text))) {
    if (await crypto.subtle.verify("HMAC", key, bytes(signature.slice(3)), signed)) return;
  }
  throw new Error("the signature is wrong");
}

function failed(error) {
  const message = error instanceof Error ? error.message : String(error);
  return new Failed(message, { code: error instanceof Error ? error.name : undefined });
}

function isLost(error) {
  return error instanceof Problem && ["lease-lost", "not-found"].includes(error.code);
}

/** True if the same request can succeed later. */
function isTemporary(problem) {
  return [408, 429, 502, 503, 504].includes(problem.status) || problem.code === "idempotency-key-in-use";
}

/** Does something again and again, with this pause before each time, until it is stopped. */
function every(pauseMs, work) {
  let timer;
  let stopped = false;
  const next = () => {
    timer = setTimeout(async () => {
      await work();
      if (!stopped) next();
    }, pauseMs);
  };
  next();
  return {
    stop() {
      stopped = true;
      clearTimeout(timer);
    },
  };
}

function left(until) {
  return Math.max(0, Math.min(LONGEST_WAIT, until - performance.now()));
}

function duration(ms) {
  return `${Math.max(0, Math.round(ms))}ms`;
}

function encoded(text) {
  const escaped = encodeURIComponent(text);
  return text === "." || text === ".." ? escaped.replaceAll(".", "%2E") : escaped;
}

function fieldsOf(text) {
  try {
    const fields = JSON.parse(text);
    return typeof fields === "object" && fields !== null ? fields : {};
  } catch {
    return {};
  }
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
