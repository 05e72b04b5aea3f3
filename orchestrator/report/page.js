// Shows what the address names, and handles keys.

const home = document.getElementById("overview");
const view = document.getElementById("view");
let homeScroll = 0;

// What the address names: {group} or {group, rollout}; null for the overview.
function addressed() {
  let hash = location.hash.slice(1);
  try {
    hash = decodeURIComponent(hash);
  } catch {
    return null;
  }
  if (hash.startsWith("rollout-")) {
    const rollout = rolloutOf.get(hash.slice(8));
    return rollout ? { rollout, group: groupOf.get(rollout.group) } : null;
  }
  const group = /^group-\d+$/.test(hash) ? groupOf.get(Number(hash.slice(6))) : undefined;
  return group ? { group } : null;
}

let routed = 0;

async function route() {
  const turn = ++routed;
  const what = addressed();
  if (!home.hidden) homeScroll = scrollY;
  home.hidden = what !== null;
  view.hidden = what === null;
  view.replaceChildren();
  if (what === null) {
    if (LIVE) home.replaceChildren(...overview().filter(Boolean));
    document.title = "Run report";
    scrollTo(0, homeScroll);
    document.body.dataset.shown = location.hash;
    return;
  }
  const { group, rollout } = what;
  const shownNow = rollout ? await rolloutView(rollout).catch(() => [el("p", "warning box", AWAY)]) : groupView(group);
  if (turn !== routed) return;  // another address was opened meanwhile
  view.replaceChildren(...shownNow.filter(Boolean));
  applyToggles();
  document.body.dataset.shown = location.hash;
  document.title = rollout ? `${plain(rollout.id.slice(0, 40))} – run report` : `Group ${group.number} – run report`;
  scrollTo(0, 0);
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

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const what = addressed();
  if (event.target.closest("input[type=search], select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    event.preventDefault();
    if (what !== null) {
      location.hash = "#";
      route();
    }
    document.getElementById("search").focus();
  } else if (event.key === "j" || event.key === "k") {
    const step = event.key === "j" ? 1 : -1;
    if (what === null) choose(step);
    else goTo(neighbour(what.group, step));
  } else if (event.key === "Enter" && what === null && table.chosen >= 0 && event.target === document.body) {
    goTo(table.rows[table.chosen]);
  } else if (event.key === "Escape" && what !== null) {
    location.hash = what.rollout ? `#group-${what.group.number}` : "#";
  }
});

// Shows what has changed, without taking a field from somebody who types in it.
function refresh(changed) {
  const typing = home.contains(document.activeElement) && document.activeElement.matches("input, select");
  if (!home.hidden && !typing && (changed.size || !home.querySelector(".live"))) home.replaceChildren(...overview().filter(Boolean));
  else if (home.querySelector(".live")) home.querySelector(".live").replaceWith(livePanel());
  const what = addressed();
  if (what !== null && !what.rollout && changed.has(what.group.number)) view.replaceChildren(...groupView(what.group).filter(Boolean));
}

addEventListener("hashchange", route);
if (LIVE) follow();
else take(JSON.parse(document.getElementById("run").textContent));
home.replaceChildren(...overview().filter(Boolean));
route();
