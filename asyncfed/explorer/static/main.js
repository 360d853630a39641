// The explorer's page: which runs and which view, kept up while runs go on.
import { Details } from "./details.js";
import { coloured } from "./learning.js";
import { LiveSource } from "./source.js";
import { Store } from "./store.js";
import { TimeBar } from "./timebar.js";
import { VIEWS, openView } from "./views.js";
import { count, make } from "./words.js";

const AGAIN = 1000; // milliseconds
const store = new Store();
const source = new LiveSource();
const at = (id) => document.getElementById(id);
let opened = null;

async function refresh() {
  const { runs } = await source.state();
  for (const run of runs) {
    if (run.taken < run.found) run.changes = `reading ${Math.floor((4 * run.taken) / run.found)}`; // four looks are enough
  }
  const before = store.runs;
  const same = (run, place) => before[place] && ["changes", "status", "error", "taken", "found"].every((name) => before[place][name] === run[name]);
  if (before.length && runs.every(same)) return;
  store.set({ runs: runs.map((run, number) => ({ ...run, number, names: before[number]?.names ?? null })) });
}

async function start() {
  await refresh();
  await Promise.all(store.runs.map(async (run) => {
    try { run.names = (await source.get(run, "about")).names; } catch { /* it says so itself */ }
  }));
  store.set({ shown: store.runs.length > 1 ? [0, 1] : [0] });
  header();
  tabs();
  show();
  new Details(at("details"), store, source);
  new TimeBar(at("time"), store, source);
  store.on(["view", "shown"], show);
  store.on(["view"], tabs);
  store.on(["runs", "shown"], header);
  store.on(["selection"], () => announce());
  document.addEventListener("keydown", key);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => store.set({ theme: {} }));
  follow();
}

async function follow() {
  for (;;) {
    await new Promise((done) => setTimeout(done, AGAIN));
    try {
      await refresh();
      at("top").classList.remove("lost");
    } catch {
      at("top").classList.add("lost");
    }
  }
}

function header() {
  const chips = store.runs.map((run) => {
    const shown = store.shown.includes(run.number);
    const going = run.taken < run.found ? `reading ${Math.round((100 * run.taken) / run.found)}%` : run.status;
    return make("button", { type: "button", class: "chip", "aria-pressed": shown, title: run.error || run.name, click: () => choose(run.number) },
      coloured(run, run.name), make("span", { class: `status ${run.error ? "failed" : run.status}` }, run.error ? "unreadable" : going),
      make("span", { class: "faint" }, `${count(run.nodes)} nodes, ${count(run.messages)} messages`));
  });
  at("top").replaceChildren(make("h1", {}, "asyncfed"), make("div", { class: "chips", role: "group", "aria-label": "Runs" }, ...chips),
    make("span", { class: "gone", role: "alert" }, "the explorer was stopped"),
    make("button", { type: "button", class: "quiet", title: "Light or dark", "aria-label": "Light or dark", click: dark }, "◐"),
    make("button", { type: "button", class: "quiet", title: "Keys (?)", "aria-label": "Keys", click: help }, "?"));
}

function choose(number) {
  const shown = store.shown.includes(number) ? store.shown.filter((one) => one !== number) : [...store.shown, number].sort((a, b) => a - b);
  if (shown.length) store.set({ shown, selection: null });
}

function tabs() {
  at("tabs").setAttribute("role", "tablist");
  const made = Object.entries(VIEWS).map(([name, words], place) => make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": store.view === name,
    "aria-controls": "stage", tabindex: store.view === name ? 0 : -1, title: `${words} (${place + 1})`, click: () => store.set({ view: name }) }, words));
  const focused = at("tabs").contains(document.activeElement);
  at("tabs").replaceChildren(...made);
  if (focused) at(`tab-${store.view}`).focus();
}

function show() {
  opened?.close();
  const stage = at("stage");
  stage.replaceChildren();
  stage.dataset.view = store.view;
  stage.setAttribute("role", "tabpanel");
  stage.setAttribute("aria-labelledby", `tab-${store.view}`);
  opened = openView(store.view, stage, store, source);
}

function announce() {
  const { selection } = store;
  const run = selection && store.runs[selection.run];
  at("said").textContent = !selection ? "" : selection.kind === "node" ? `node ${store.name(run, selection.node)} selected`
    : `link from ${store.name(run, selection.sender)} to ${store.name(run, selection.receiver)} selected`;
}

function dark() {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  store.set({ theme: {} });
}

const KEYS = [["1 – 5", "the views"], ["space", "play or pause"], ["← →", "move the cursor (with shift: further)"], ["+ −", "zoom time"], ["0", "the whole run"], ["Esc", "select nothing"], ["?", "this help"]];

function help() {
  const list = make("dl", { class: "facts" });
  for (const [name, words] of KEYS) list.append(make("dt", {}, name), make("dd", {}, words));
  const dialog = make("dialog", { "aria-label": "Keys" }, make("h2", {}, "Keys"), list, make("form", { method: "dialog" }, make("button", {}, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const [from, to] = store.looked;
  const step = ((to - from) / 200) * (event.shiftKey ? 10 : 1);
  const names = Object.keys(VIEWS);
  const middle = store.cursor ?? (from + to) / 2;
  const tab = event.target.getAttribute?.("role") === "tab";
  const moves = { ArrowLeft: -1, ArrowRight: 1 };
  if (tab && moves[event.key]) store.set({ view: names[(names.indexOf(store.view) + moves[event.key] + names.length) % names.length] });
  else if (moves[event.key]) store.set({ cursor: Math.max(store.span[0], Math.min(store.span[1], middle + moves[event.key] * step)) });
  else if (names[Number(event.key) - 1]) store.set({ view: names[Number(event.key) - 1] });
  else if (event.key === " " && event.target.tagName !== "BUTTON") document.querySelector(".play").click();
  else if (event.key === "+" || event.key === "=") store.zoom(0.5, middle);
  else if (event.key === "-") store.zoom(2, middle);
  else if (event.key === "0") store.set({ window: null });
  else if (event.key === "Escape") store.set({ selection: null });
  else if (event.key === "?") help();
  else return;
  event.preventDefault();
}

start().catch((error) => at("stage").replaceChildren(make("p", { class: "warning", role: "alert" }, error.message)));
