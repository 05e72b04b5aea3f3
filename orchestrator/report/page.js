// Shows what the address names, and handles keys.

const home = document.getElementById("overview");
const view = document.getElementById("view");
let homeScroll = 0;

let current = null;  // what is shown, as `addressed` gives it

// What the address names: {group}, {group, rollout, turn} or {group, rollout, other}; null for the overview.
async function addressed() {
  const [hash, ...rest] = location.hash.slice(1).split("/").map((piece) => {
    try {
      return decodeURIComponent(piece);
    } catch {
      return "";
    }
  });
  if (hash.startsWith("rollout-") || hash.startsWith("beside-")) {
    const aside = hash.startsWith("beside-");
    const id = hash.slice(aside ? 7 : 8);
    if (SERVED) await askGroup({ rollout: id });
    const rollout = rolloutOf.get(id);
    const other = aside ? rolloutOf.get(rest[0]) : undefined;
    if (!rollout || (aside && (!other || other.group !== rollout.group))) return null;
    return { rollout, other, turn: aside ? 0 : Number(rest[0]) || 0, group: groupOf.get(rollout.group) };
  }
  if (SERVED && /^group-\d{1,15}$/.test(hash)) await askGroup({ number: hash.slice(6) });
  const group = /^group-\d+$/.test(hash) ? groupOf.get(Number(hash.slice(6))) : undefined;
  return group ? { group } : null;
}

let routed = 0;

// `again`: what is shown already has changed.
async function route(again) {
  const turn = ++routed;
  const what = await addressed().catch(() => ({ away: true }));
  if (turn !== routed) return;  // another address was opened meanwhile
  if (what !== null && what.away) {
    live.away = true;
    view.replaceChildren(el("p", "warning box", AWAY));
    [home.hidden, view.hidden, current] = [true, false, null];
    return;
  }
  current = what;
  if (!home.hidden) homeScroll = scrollY;
  home.hidden = what !== null;
  view.hidden = what === null;
  if (again !== true) view.replaceChildren();
  if (what === null) {
    const before = overviewHash();
    if (location.hash.startsWith("#?") || location.hash === "#" || !location.hash) setTable(location.hash);
    if (SERVED || before !== overviewHash()) home.replaceChildren(...overview().filter(Boolean));
    document.title = titleOf("");
    scrollTo(0, homeScroll);
    document.body.dataset.shown = location.hash;
    return;
  }
  const { group, rollout, other } = what;
  const build = other ? besideView(rollout, other) : rollout ? rolloutView(rollout) : Promise.resolve(groupView(group));
  const at = scrollY;
  const shownNow = await build.catch(() => [el("p", "warning box", AWAY)]);
  if (turn !== routed) return;  // another address was opened meanwhile
  view.replaceChildren(...shownNow.filter(Boolean));
  applyToggles();
  document.body.dataset.shown = location.hash;
  document.title = titleOf(rollout ? plain(rollout.id.slice(0, 40)) : `Group ${group.number}`);
  const named = what.turn ? document.getElementById(`turn-${what.turn}`) : null;
  if (again === true) scrollTo(0, at);
  else if (named) named.scrollIntoView();
  else scrollTo(0, 0);
}

function titleOf(what) {
  return [what, plain(run.name), "run report"].filter(Boolean).join(" – ");
}

function choose(step) {
  const rows = document.querySelectorAll(".groups tbody tr");
  if (!rows.length) return;
  table.chosen = Math.max(0, Math.min(rows.length - 1, table.chosen + step));
  rows.forEach((row, place) => row.classList.toggle("chosen", place === table.chosen));
  rows[table.chosen].scrollIntoView({ block: "nearest" });
}

function goTo(group) {
  if (group) location.hash = `#group-${group.number}`;
}

document.addEventListener("keydown", async (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const what = current;
  if (event.target.closest("input[type=search], select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    event.preventDefault();
    if (what !== null) {
      location.hash = overviewHash();
      await route();
    }
    document.getElementById("search").focus();
  } else if (event.key === "j" || event.key === "k") {
    const step = event.key === "j" ? 1 : -1;
    if (what === null) choose(step);
    else goTo(neighbour(what.group, step));
  } else if ((event.key === "n" || event.key === "p") && what !== null) {
    const place = what.rollout ? what.group.attempts.indexOf(what.rollout) + (event.key === "n" ? 1 : -1) : 0;
    const next = what.group.attempts[place];
    if (next) location.hash = rolloutHash(next);
  } else if (event.key === "Enter" && what === null && table.chosen >= 0 && event.target === document.body) {
    goTo(table.rows[table.chosen]);
  } else if (event.key === "Escape" && what !== null) {
    location.hash = what.rollout ? `#group-${what.group.number}` : overviewHash();
  }
});

// Who is at a link or button stays there.
function redrawHome() {
  const nameOf = (element) => element.href || element.textContent;
  const focused = document.activeElement;
  const name = home.contains(focused) ? nameOf(focused) : null;
  home.replaceChildren(...overview().filter(Boolean));
  const same = home.contains(focused) ? focused : [...home.querySelectorAll("a, button")].find((element) => nameOf(element) === name);
  if (same && name !== null) same.focus({ preventScroll: true });
}

// Shows what has changed, without taking a field from somebody who types in it, or the time line from who is in it.
async function refresh(changed) {
  const focused = document.activeElement;
  const typing = home.contains(focused) && focused.matches("input, select, canvas");
  if (!home.hidden && (!home.childElementCount || (changed && !typing))) redrawHome();
  for (const name of Object.keys(NOW)) {
    const before = home.querySelector(`.${name}`);
    if (before && !before.contains(focused)) before.replaceWith(nowPanel(name));
  }
  if (current === null || live.away) return;
  const { group, rollout } = current;
  if (rollout ? rollout.running || (changed && !group.written && !group.dropped && await isWritten(rollout)) : changed) await route(true);
}

// A rollout that has ended has tokens to show once its group is written.
async function isWritten(rollout) {
  await askGroup({ rollout: rollout.id }).catch(() => null);
  return Boolean(groupOf.get(rollout.group)?.written);
}

// After whatever changes what is shown.
let looking = 0;
new MutationObserver(() => {
  cancelAnimationFrame(looking);
  looking = requestAnimationFrame(letKeysScroll);
}).observe(document.querySelector("body"), { childList: true, subtree: true, attributeFilter: ["open", "hidden"] });
addEventListener("resize", letKeysScroll);
addEventListener("hashchange", () => route());
if (SERVED) {
  setTable(location.hash);
  follow();
} else {
  takeAll(JSON.parse(document.getElementById("run").textContent));
  home.replaceChildren(...overview().filter(Boolean));
  route();
}
