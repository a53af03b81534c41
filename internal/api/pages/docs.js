const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();

SwaggerUIBundle({
  url: "openapi.yaml",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayOperationId: true,
  defaultModelsExpandDepth: 0, // The schemas are many; folded, they do not bury the operations.
  validatorUrl: null, // The validator is somebody else's host.
});
