// What the scripts use of the module k6: check, which returns whether all has held and lets the script go on.
export const checks = [];

export function check(value, facts) {
  let all = true;
  for (const [name, holds] of Object.entries(facts)) {
    const ok = Boolean(holds(value));
    checks.push({ name, ok, status: value.status, body: value.body });
    all = all && ok;
  }
  return all;
}
