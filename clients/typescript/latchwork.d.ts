// The types of latchwork.js.

/** An answer that is no success. `code` is stable; `fields` are all fields of the problem document. */
export class Problem extends Error {
  readonly status: number;
  readonly code: string;
  readonly fields: Readonly<Record<string, unknown>>;
}

/** The server did not answer within the client's patience. A call that changes something may have had its effect. */
export class Unreachable extends Error {}

/** The session ended before its lock was released: another owner may hold the lock. */
export class LockLost extends Error {}

/** The time of a wait is up. */
export class TimedOut extends Error {}

export interface FailedOptions {
  /** A code for programs. */
  code?: string;
  details?: unknown;
  /** False if no other attempt makes sense. */
  retryable?: boolean;
  /** The pause before the next attempt. */
  pauseMs?: number;
}

/** Thrown by the code of a worker: the attempt has failed, in these words. */
export class Failed extends Error {
  constructor(message: string, options?: FailedOptions);
}

export interface ServerOptions {
  token?: string;
  namespace?: string;
  /** How long a call is repeated while the server cannot be reached or is busy; by default 30 s. */
  patienceMs?: number;
}

export interface RequestOptions {
  body?: unknown;
  query?: Record<string, string>;
  headers?: Record<string, string>;
  /** The `Idempotency-Key`; by default a new one for each call. */
  key?: string;
  /** False for a call without an `Idempotency-Key`. */
  keyed?: boolean;
  /** How long the server may wait before it answers. */
  takesMs?: number;
  /** How long the call is repeated. */
  patienceMs?: number;
}

export interface LockOptions {
  /** How long to wait for the lock; without it, for ever. */
  waitMs?: number;
  /** How long the lock outlives this process; by default 30 s. */
  leaseMs?: number;
  mode?: "mutex" | "semaphore" | "read" | "write";
  /** How many permits a semaphore has. */
  capacity?: number;
  /** How many permits are wanted. */
  permits?: number;
}

export interface HeldLock {
  readonly name: string;
  /** The fencing token: larger than that of every earlier holder. */
  readonly token: number;
  /** Aborts as soon as it is known that the lock is lost. */
  readonly lost: AbortSignal;
  /** Throws `LockLost` if the lock is known to be lost. */
  check(): void;
}

export interface FireOptions {
  input?: unknown;
  requester?: string;
  actor?: string;
  /** The same key asks for the same firing. */
  key?: string;
  /** How long to wait for the action; by default five minutes. */
  waitMs?: number;
}

export interface Fired {
  outcome: string;
  from: string;
  to: string;
  rev: number;
  output: any;
  is_recovered: boolean;
}

export interface TaskOptions {
  /** A task of an id is put once. */
  id?: string;
  /** What the worker passes to receivers as their idempotency key. */
  key?: string;
  attempts?: number;
  /** Durations, such as `30s`. */
  pause?: string;
  longest_pause?: string;
  delay?: string;
}

export interface Task<Input = any, Output = any> {
  id: string;
  kind: string;
  /** The idempotency key for receivers: the same for each attempt. */
  key: string;
  state: "open" | "leased" | "done" | "failed" | "cancelled";
  input: Input;
  attempt: number;
  attempts: number;
  /** The fencing token: larger than that of each earlier worker at this task. */
  token: number;
  put_at: string;
  due_at: string | null;
  worker: string | null;
  lease_until: string | null;
  lease_ms: number | null;
  ended_at: string | null;
  output: Output | null;
  failure: { message: string; code: string | null; details: unknown } | null;
  reason: string | null;
  /** The W3C trace context of the work, if the server makes traces and has given the task to a worker. */
  traceparent?: string;
}

/** Does a task. `lost` aborts when another worker may have it. */
export type Handler = (task: Task, lost: AbortSignal) => unknown;

export interface WorkerOptions {
  /** How long the worker may be silent before another one gets its task; by default 30 s. */
  leaseMs?: number;
  /** How many tasks it does at a time; by default one. */
  concurrency?: number;
  /** The name that operators see. */
  name?: string;
}

/** A server, and the namespace that is used there. */
export class Latchwork {
  constructor(url?: string, options?: ServerOptions);
  /** Sends a request until it is answered, and returns the JSON of the answer. */
  request(method: string, path: string, options?: RequestOptions): Promise<any>;
  /** Holds a lock while the function runs, and renews it. */
  lock<T>(name: string, options: LockOptions, work: (held: HeldLock) => Promise<T> | T): Promise<T>;
  /**
   * Fires a step of a claim workflow, and waits for its action. Of several callers, the action runs for one; the others
   * get a `Problem`: `claimed`, or `not-permitted`.
   */
  fire(workflow: string, step: string, entity: string, options?: FireOptions): Promise<Fired>;
  /** Puts a task, once for each id. */
  putTask(kind: string, input?: unknown, options?: TaskOptions): Promise<Task>;
  /** Shows a task, and waits at most so long for its end. */
  task(id: string, options?: { waitMs?: number }): Promise<Task>;
  /** A worker that does tasks: a function for each kind. */
  worker(handlers: Record<string, Handler>, options?: WorkerOptions): Worker;
}

/** Takes tasks by long poll, and does them. A heartbeat keeps the lease of each. */
export class Worker {
  constructor(server: Latchwork, handlers: Record<string, Handler>, options?: WorkerOptions);
  /** Works until `stop` is called. */
  run(): Promise<void>;
  /** Takes no more tasks. `run` returns when those that were taken are done. */
  stop(): void;
}

/** Checks that a call of an endpoint comes from the server (Standard Webhooks). Throws otherwise. */
export function verify(
  body: string,
  headers: ConstructorParameters<typeof Headers>[0],
  secret: string,
  options?: { toleranceMs?: number },
): Promise<void>;
