// What all views share: which runs, which window of time, where the cursor is, what is selected.

export class Store {
  constructor(values) {
    Object.assign(this, { runs: [], shown: [0], view: "network", window: null, cursor: null, playing: false,
      selection: null, quantity: "delivery_rate", layout: null, axis: "step", sort: "number" }, values);
    this.listeners = new Set();
  }

  /** Change values, and tell who listens which of them are others now. */
  set(values) {
    const changed = new Set(Object.keys(values).filter((name) => this[name] !== values[name]));
    if (!changed.size) return;
    Object.assign(this, values);
    for (const listener of [...this.listeners]) listener(changed);
  }

  /** Calls with any of these; returns how to stop it. */
  on(names, call) {
    const listener = (changed) => { if (names.some((name) => changed.has(name))) call(changed); };
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** From the first to the last time of the runs that are shown. */
  get span() {
    const runs = this.runs.length ? this.shown.map((number) => this.runs[number]) : [];
    const to = Math.max(0, ...runs.map((run) => run.to));
    return [Math.min(0, ...runs.map((run) => run.from)), to > 0 ? to : 1];
  }

  /** What is looked at: the window, or everything. */
  get looked() {
    return this.window ?? this.span;
  }

  /** What to ask a sum over the window for: nothing, of the whole run. */
  get asked() {
    return this.window ? { from: this.window[0], to: this.window[1] } : {};
  }

  /** Look at a part of the time, at least a sliver, and not beyond what there is. */
  look(from, to) {
    const [first, last] = this.span;
    const margin = (last - first) * 0.02;
    const width = Math.min(Math.max(to - from, (last - first) * 1e-7), last - first + 2 * margin);
    let begin = Math.max(from, first - margin);
    if (begin + width > last + margin) begin = last + margin - width;
    const whole = width >= (last - first) * 0.999;
    this.set({ window: whole ? null : [begin, begin + width] });
  }

  zoom(factor, around) {
    const [from, to] = this.looked;
    this.look(around - (around - from) * factor, around + (to - around) * factor);
  }

  name(run, node) {
    if (node === run.server) return run.names ? `${run.names[node]} (server)` : "server";
    return run.names ? run.names[node] : String(node);
  }
}
