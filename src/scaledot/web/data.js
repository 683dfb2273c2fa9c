/**
 * Where the numbers come from: the document inlined in a report, or the local server.
 *
 * A report holds <script type="application/json" id="document">, and the messages in
 * "messages-en" and "messages-ja"; without them the page asks the server that sent it.
 */

/** @typedef {{shape: number[], data: Float32Array}} Decoded */

/**
 * The array of a document: {"shape": …, "float32": base64, little-endian}.
 *
 * @returns {Decoded|null}
 */
export function decodeArray(array) {
  if (array === null || array === undefined) return null;
  const bytes = Uint8Array.from(atob(array.float32), (x) => x.charCodeAt(0));
  const size = array.shape.reduce((x, y) => x * y, 1);
  if (bytes.length !== 4 * size) {
    throw new Error(`an array of ${array.shape.join("×")} came with ${bytes.length} bytes`);
  }
  const view = new DataView(bytes.buffer);
  const data = new Float32Array(size);
  for (let i = 0; i < size; i++) data[i] = view.getFloat32(4 * i, true);
  return { shape: array.shape, data };
}

/** What a document says of one head, decoded: query, key, value, sink, hidden, bias. */
export function decodeHead(head) {
  return {
    query: decodeArray(head.query),
    key: decodeArray(head.key),
    value: decodeArray(head.value),
    sink: head.sink ?? null,
    hidden: decodeArray(head.hidden),
    bias: decodeArray(head.bias),
  };
}

/** JSON inlined in the page under an id, or null. */
export function inlined(id) {
  const script = document.getElementById(id);
  return script === null ? null : JSON.parse(script.textContent);
}

/** An answer of the server; its own sentence is the error's message. */
export async function ask(path, { body, signal } = {}) {
  const headers = { accept: "application/json" };
  const token = new URLSearchParams(location.search).get("token");
  if (token !== null) headers["x-scaledot-token"] = token;
  const request = { method: "GET", headers, signal };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(request, { method: "POST", body: JSON.stringify(body) });
  }
  const answer = await fetch(path, request);
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const error = new Error(told.error ?? `${answer.status} ${answer.statusText}`);
    throw Object.assign(error, { status: answer.status, told });
  }
  return told;
}

/** Bytes of the arrays in what decodeHead and decodeArray give. */
export function bytesOf(decoded) {
  return Object.values(decoded).reduce((sum, x) => sum + (x?.data?.byteLength ?? 0), 0);
}

/**
 * A map that forgets what was used longest ago, so that a tab's memory does not grow with every
 * head looked at: at most so many bytes, the latest value in any case. Values that are still being
 * loaded are promises; `weigh` says what they take once it is known.
 */
export function recent(limit) {
  const kept = new Map();
  let total = 0;
  const forget = (key) => {
    total -= kept.get(key)?.bytes ?? 0;
    kept.delete(key);
  };
  const put = (key, value, bytes) => {
    forget(key);
    kept.set(key, { value, bytes });
    total += bytes;
    while (total > limit && kept.size > 1) forget(kept.keys().next().value);
  };
  return {
    get(key) {
      const found = kept.get(key);
      if (found !== undefined) put(key, found.value, found.bytes);
      return found?.value;
    },
    set: (key, value) => put(key, value, 0),
    weigh(key, value, bytes) {
      if (kept.get(key)?.value === value) put(key, value, bytes);
    },
    delete: forget,
  };
}
