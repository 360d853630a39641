// Where answers come from: the server that served this page, or data that stands in it (a report).

const ARRAYS = { Float64Array, Float32Array, Int32Array, Uint8Array };

/** Columns as explorer/packed.py sends them: {facts, name: typed array, …}. */
export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const table = { facts: head.facts };
  let place = 4 + length;
  for (const [name, kind, count] of head.columns) {
    const made = new ARRAYS[kind](buffer, place, count);
    table[name] = made;
    place += Math.ceil(made.byteLength / 8) * 8;
  }
  return table;
}

const MOST_KEPT = 96e6; // bytes of answers

const AS_JSON = new Set(["about", "metrics", "marks"]);

export class LiveSource {
  constructor() {
    this.kept = new Map();
    this.live = true;
  }

  async state() {
    return (await this.fetched("api/state")).json();
  }

  /** What a run says about something; kept as long as the run has nothing new. */
  get(run, what, values = {}) {
    const query = new URLSearchParams(Object.entries(values).map(([name, value]) => [name, String(value)]));
    const address = `api/${run.number}/${what}?${query}`;
    const key = `${address} ${run.changes} ${run.status}`;
    if (!this.kept.has(key)) {
      const answer = this.fetched(address).then(async (response) => {
        this.room(key, Number(response.headers.get("Content-Length")));
        return AS_JSON.has(what) ? response.json() : unpack(await response.arrayBuffer());
      });
      answer.catch(() => this.kept.delete(key));
      this.kept.set(key, { answer, size: 0 });
    }
    return this.kept.get(key).answer;
  }

  /** Forget the oldest answers where there would be too many. */
  room(key, size) {
    if (this.kept.has(key)) this.kept.get(key).size = size;
    let total = [...this.kept.values()].reduce((sum, one) => sum + one.size, 0);
    for (const [old, one] of this.kept) {
      if (this.kept.size <= 60 && total <= MOST_KEPT) break;
      if (old !== key) { this.kept.delete(old); total -= one.size; }
    }
  }

  async fetched(address) {
    const response = await fetch(address, { cache: "no-store" });
    if (!response.ok) throw new Error((await response.text()).trim() || response.statusText);
    return response;
  }
}

/** Of a report: what was put into it, of the whole run; and of one window, every message. */
export class EmbeddedSource {
  constructor(embedded) {
    this.runs = embedded.runs;
    this.live = false;
    this.kept = new Map();
  }

  async state() {
    return { runs: this.runs.map((run) => run.state) };
  }

  async get(run, what, values = {}) {
    const answers = this.runs[run.number].answers;
    let name = what;
    if (what === "window") {
      const [from, to] = this.runs[run.number].detail ?? [Infinity, -Infinity];
      if (values.from >= from && values.to <= to) name = "detail";
    }
    if (!(name in answers)) throw new Error("the report holds no more of it; asyncfed view does");
    if (AS_JSON.has(what)) return answers[name];
    const key = `${run.number} ${name}`;
    if (!this.kept.has(key)) this.kept.set(key, unzipped(answers[name]).then(unpack));
    return this.kept.get(key);
  }
}

async function unzipped(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
