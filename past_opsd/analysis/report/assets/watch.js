"use strict";
(() => {
  const settings = JSON.parse(document.getElementById("past-live").dataset.settings);
  let version = settings.version, state = null, heard = 0, lost = false;
  const badge = document.createElement("div");
  badge.id = "past-badge";
  badge.style.cssText = "position:fixed;right:1rem;bottom:1rem;z-index:9;padding:.35rem .8rem;border-radius:99px;" +
    "font:600 .8rem/1.4 system-ui,sans-serif;background:#1c2330;color:#fff;box-shadow:0 2px 12px rgb(0 0 0/35%)";
  document.body.append(badge);
  document.documentElement.style.overflowAnchor = "none";  // swap() keeps the reader's place; two hands would move it twice

  const ago = (s) =>
    s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
  function tell() {
    if (lost) badge.textContent = "past watch has stopped";
    else if (!state) badge.textContent = "live";
    else if (state.problem) badge.textContent = `not refreshed: ${state.problem}`;
    else if (state.finished) badge.textContent = `finished: ${state.text}`;
    else badge.textContent =
      `live: ${state.text}` + (state.ready ? `, updated ${ago(state.age + (Date.now() - heard) / 1000)} ago` : "");
  }

  const sections = (root) => new Map([...root.querySelectorAll("main > section")].map((s) => [s.id, s]));
  const source = new Map([...sections(document)].map(([id, s]) => [id, s.innerHTML]));
  let top = document.querySelector("header.top")?.innerHTML;

  // What a reader did to a section, by place: opened details, scrolled tables, the focus.
  function places(section) {
    const seen = new Map();
    return [...section.querySelectorAll("details, summary, .scroll, svg[tabindex]")].map((element) => {
      const kind = `${element.parentElement.closest("[id]").id} ${element.tagName} ${element.getAttribute("class")}`;
      seen.set(kind, (seen.get(kind) || 0) + 1);
      return [`${kind} ${seen.get(kind)}`, element];
    });
  }
  function refill(section, fresh) {
    const kept = new Map(places(section).map(([place, e]) =>
      [place, { open: e.open, left: e.scrollLeft, focus: e === document.activeElement }]));
    section.replaceChildren(...fresh.childNodes);
    for (const [place, element] of places(section)) {
      const was = kept.get(place);
      if (!was) continue;
      if (element.tagName === "DETAILS") element.open = was.open;
      element.scrollLeft = was.left;
      if (was.focus) element.focus({ preventScroll: true });
    }
  }

  function swap(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const main = document.querySelector("main"), next = fresh.querySelector("main");
    if (!main || !next) { location.reload(); return; }
    const old = sections(document), wanted = sections(fresh);
    const named = [...main.querySelectorAll("[id]")].filter((e) => e.getClientRects().length);
    // What the reader looks at: the last thing that begins where a link would put it, or above.
    const begin = parseFloat(getComputedStyle(document.documentElement).scrollPaddingTop) + 5;
    const seen = named.filter((e) => e.getBoundingClientRect().top < begin).pop();
    const before = seen?.getBoundingClientRect().top;
    const header = fresh.querySelector("header.top");
    if (header.innerHTML !== top) {
      top = header.innerHTML;
      const theme = document.getElementById("theme");
      const parts = [...header.childNodes].map((node) => (node.id === "theme" ? theme : node));
      document.querySelector("header.top").replaceChildren(...parts);
    }
    let previous = null;
    for (const [id, section] of wanted) {
      const html = section.innerHTML, present = old.get(id);
      if (!present) previous ? previous.after(section) : main.prepend(section);
      else if (source.get(id) !== html) refill(present, section);
      source.set(id, html);
      previous = present || section;
    }
    for (const [id, section] of old) if (!wanted.has(id)) section.remove();
    const links = new Map([...document.querySelectorAll(".toc a")].map((a) => [a.getAttribute("href"), a]));
    document.querySelector(".toc").replaceChildren(
      ...[...fresh.querySelectorAll(".toc a")].map((a) => links.get(a.getAttribute("href")) || a));
    document.title = fresh.title;
    version = JSON.parse(fresh.getElementById("past-live").dataset.settings).version;
    const again = seen && document.getElementById(seen.id);
    if (again) scrollBy({ top: again.getBoundingClientRect().top - before, behavior: "instant" });
  }

  async function get(path) {
    const response = await fetch(path);
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response;
  }
  async function look() {
    try {
      if (document.hidden) return;
      let text = null;
      try {
        state = await (await get("/state")).json();
        heard = Date.now();
        if (state.version !== version) text = await (await get("/")).text();
        lost = false;
      } catch {
        lost = true;
      }
      if (text !== null) swap(text);
      tell();
    } finally {
      setTimeout(look, 1000 * settings.every);
    }
  }
  setInterval(tell, 1000);
  look();
})();
