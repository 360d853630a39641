// A canvas that fills its box sharply, and what all of them need: zoom, pan, hover, keys.

export class Sheet {
  constructor(root, label) {
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", label);
    this.canvas.tabIndex = 0;
    root.append(this.canvas);
    this.context = this.canvas.getContext("2d");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    root.append(this.tip);
    this.width = this.height = 0;
    this.resized = () => {};
    this.watch = new ResizeObserver(() => { if (this.fit()) this.resized(); });
    this.watch.observe(this.canvas);
    this.fit();
  }

  label(text) {
    this.canvas.setAttribute("aria-label", text);
  }

  /** Whether the size has changed. */
  fit() {
    const box = this.canvas.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (width === this.canvas.width && height === this.canvas.height && this.width) return false;
    [this.canvas.width, this.canvas.height] = [width, height];
    [this.width, this.height] = [box.width, box.height];
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return width > 0 && height > 0;
  }

  clear() {
    this.context.clearRect(0, 0, this.width, this.height);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  say(text, x, y) {
    this.tip.hidden = !text;
    if (!text) return;
    this.tip.textContent = text;
    const left = x > this.width / 2;
    this.tip.style.left = left ? "auto" : `${x + 14}px`;
    this.tip.style.right = left ? `${this.width - x + 14}px` : "auto";
    this.tip.style.top = `${Math.max(4, Math.min(y + 12, this.height - this.tip.offsetHeight - 4))}px`;
  }

  /** Pointer and wheel as what they mean: pan(dx, dy), zoom(factor, x, y, event), click(x, y), hover(x, y). */
  listen({ pan, zoom, click, hover, twice }) {
    const pointers = new Map();
    let moved = 0;
    let apart = 0;
    this.canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, this.at(event));
      try { this.canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone again */ }
      moved = 0;
      apart = distance(pointers);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = this.at(event);
      const before = pointers.get(event.pointerId);
      if (!before) { hover?.(x, y); return; }
      pointers.set(event.pointerId, [x, y]);
      if (pointers.size === 2) {
        const now = distance(pointers);
        const middle = centre(pointers);
        if (apart && now) zoom?.(apart / now, middle[0], middle[1], event);
        apart = now;
        moved = Infinity;
        return;
      }
      moved += Math.hypot(x - before[0], y - before[1]);
      if (moved > 4) { this.say(""); pan?.(x - before[0], y - before[1], event); }
    });
    const released = (event) => {
      const [x, y] = this.at(event);
      if (pointers.delete(event.pointerId) && moved <= 4 && event.type === "pointerup") click?.(x, y, event);
    };
    this.canvas.addEventListener("pointerup", released);
    this.canvas.addEventListener("pointercancel", released);
    this.canvas.addEventListener("pointerleave", () => { this.say(""); hover?.(null, null); });
    this.canvas.addEventListener("dblclick", (event) => twice?.(...this.at(event), event));
    this.canvas.addEventListener("wheel", (event) => {
      if (!zoom) return;
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      zoom(Math.exp(Math.max(-120, Math.min(120, (event.deltaY || event.deltaX) * lines)) / 400), ...this.at(event), event);
    }, { passive: false });
  }
}

function distance(pointers) {
  const [one, other] = [...pointers.values()];
  return other ? Math.hypot(one[0] - other[0], one[1] - other[1]) : 0;
}

function centre(pointers) {
  const [one, other] = [...pointers.values()];
  return [(one[0] + other[0]) / 2, (one[1] + other[1]) / 2];
}

/** Calls at most once in a frame. */
export function framed(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; draw(); });
  };
}

/** Calls when nothing more came for a while. */
export function calmed(call, milliseconds) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, milliseconds);
  };
}
