"use strict";
// Charts as of now take the place of those that are there, and the state of the server stands above them.
const every = 2000;  // milliseconds
async function ask() {
  const state = document.getElementById("state");
  try {
    const [page, health] = await Promise.all([fetch("status"), fetch("health")]);
    const charts = new DOMParser().parseFromString(await page.text(), "text/html").querySelector("main");
    if (!page.ok || !charts) throw new Error(`status ${page.status}`);
    document.querySelector("main").replaceWith(charts);
    state.textContent = (await health.json()).status;
  } catch (why) { state.textContent = "no answer: " + why.message; }
  setTimeout(ask, every);
}
ask();
