// Lets `import … from 'k6'` find the stand-in. k6 itself is a program that is not on npm, and nothing here depends on it.
import { register } from 'node:module';

register(
  `data:text/javascript,${encodeURIComponent(`
    const standin = { k6: ${JSON.stringify(new URL('./k6.mjs', import.meta.url).href)}, 'k6/http': ${JSON.stringify(new URL('./http.mjs', import.meta.url).href)} };
    export function resolve(specifier, context, next) {
      return standin[specifier] ? { url: standin[specifier], shortCircuit: true } : next(specifier, context);
    }`)}`,
);
