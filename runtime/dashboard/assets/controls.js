// What a person may tell a run that goes on. The answer is the run's own, and stands beside the buttons.
import { el } from "./dom.js";

const POLICIES = ["sync", "one_step_off", "fully_async"];

/** tell(command) → {accepted, text} */
export function controls(tell) {
  const said = el("output", { role: "status" });
  const buttons = [];

  async function send(command, what) {
    said.className = "";
    said.textContent = `${what} …`;
    for (const button of buttons) button.disabled = true;
    try {
      const answer = await tell(command);
      said.textContent = answer.text;
      said.className = answer.accepted ? "good" : "bad";
    } catch (error) {
      said.textContent = error.message;
      said.className = "bad";
    }
    for (const button of buttons) button.disabled = false;
  }

  function button(text, act) {
    buttons.push(el("button", { type: "button", click: act }, text));
    return buttons.at(-1);
  }

  const policy = el("select", { "aria-label": "policy" }, ...POLICIES.map((name) => el("option", {}, name)));
  const bound = el("input", { type: "number", min: 0, max: 1000, "aria-label": "max_staleness", placeholder: "bound" });
  const change = () => send({
    type: "SwitchPolicy", policy: policy.value, options: bound.value === "" ? {} : { max_staleness: Number(bound.value) },
  }, "switching");
  let isSure = false;
  const stop = button("Stop", () => {
    if (isSure) { send({ type: "StopRun" }, "stopping"); return; }
    isSure = true;
    stop.textContent = "Stop: sure?";
    setTimeout(() => { isSure = false; stop.textContent = "Stop"; }, 4000);
  });
  const parts = [
    el("span", { class: "group" }, policy, bound, button("Switch policy", change)),
    button("Pause grants", () => send({ type: "PauseGrants" }, "pausing")),
    button("Resume grants", () => send({ type: "ResumeGrants" }, "resuming")),
    button("Save", () => send({ type: "SaveCheckpoint" }, "saving")), stop, said,
  ];
  return el("details", {}, el("summary", {}, "Control"), el("div", { class: "controls" }, ...parts));
}
