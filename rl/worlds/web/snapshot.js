// The page as nested lists [tag, attributes, index, flags, box, field, children]; elements are kept by index for later actions.
// Nothing is written into the page.
async (options) => {
  if (options.quiet >= 0) await new Promise(done => setTimeout(() => requestAnimationFrame(done), options.quiet));
  if (!document.documentElement) throw new Error("there is no document");
  const began = performance.now();
  const W = window.innerWidth, H = window.innerHeight;
  const SKIPPED = new Set(["HEAD", "SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "META", "LINK", "BASE", "TITLE"]);
  const TAGS = new Set(["INPUT", "TEXTAREA", "SELECT", "BUTTON", "A", "IFRAME", "VIDEO", "OBJECT", "EMBED", "DETAILS"]);
  const ROLES = new Set(["button", "tab", "link", "checkbox", "menuitem", "menuitemcheckbox", "menuitemradio", "radio"]);
  const KEPT = ["title", "value", "type", "placeholder", "selected", "data-testid", "data-label", "role", "aria-label", "alt", "for", "id",
    "name", "href", "class", "disabled", "required", "readonly", "maxlength", "contenteditable", "target"];
  const elements = [];
  const centres = {}; // where the pointer meets an element, by index
  let truncated = false;
  const clip = (r) => {
    const left = Math.max(0, r.left), top = Math.max(0, r.top), right = Math.min(W, r.right), bottom = Math.min(H, r.bottom);
    return right - left > 0 && bottom - top > 0 && (right - left) * (bottom - top) >= 1 ? [(left + right) / 2, (top + bottom) / 2] : null;
  };
  const hit = (element, rects, index) => {
    for (const rect of rects) {
      const at = clip(rect);
      const top = at && document.elementFromPoint(at[0], at[1]);
      if (top && (top === element || element.contains(top))) {
        centres[index] = at;
        return true;
      }
    }
    return false;
  };
  const clickable = (element, tag, style) => {
    if (TAGS.has(tag) || element.onclick || element.hasAttribute("onclick") || style.cursor === "pointer") return true;
    if (ROLES.has((element.getAttribute("role") || "").toLowerCase()) || element.isContentEditable && !element.parentElement.isContentEditable) return true;
    if (tag === "IMG" && element.hasAttribute("usemap")) return true;
    if ((element.getAttribute("jsaction") || "").includes("click")) return true;
    if (tag === "LABEL" && element.control && !element.control.disabled) return true;
    const named = element.getAttribute("class") || "";
    return named.toLowerCase().includes("button") || (element.hasAttribute("tabindex") && element.tabIndex >= 0);
  };
  const held = (element, tag) => {
    if (tag === "INPUT") return [element.value, element.checked, -1];
    if (tag === "TEXTAREA") return [element.value, false, -1];
    if (tag === "SELECT") return [element.value, false, element.selectedIndex];
    if (tag === "OPTION") return [element.value, element.selected, -1];
    return null;
  };
  const visit = (element) => {
    const tag = element.tagName.toUpperCase();
    if (SKIPPED.has(tag) || (options.skip && element.matches(options.skip))) return null;
    const index = elements.length;
    elements.push(element);
    if (index % 64 === 0 && performance.now() - began > options.budget) truncated = true;
    if (truncated) return null;
    const rects = element.getClientRects();
    const first = rects.length ? rects[0] : null;
    const meets = first !== null && first.right >= 0 && first.left <= W && first.bottom >= 0 && first.top <= H;
    let flags = 0;
    if (meets || rects.length > 1) {
      const style = getComputedStyle(element);
      if (meets && style.visibility !== "hidden" && element.getAttribute("aria-hidden") !== "true") flags |= 1;
      if (style.visibility !== "hidden" && clickable(element, tag, style) && hit(element, rects, index)) flags |= 2;
      else if (flags && !options.live) centres[index] = clip(first);
    }
    const inSelect = tag === "OPTION" || tag === "OPTGROUP";
    const children = [];
    for (const child of element.childNodes) {
      if (child.nodeType === 3) {
        if (child.nodeValue.trim() && (flags || inSelect)) children.push(child.nodeValue.slice(0, 2000));
      } else if (child.nodeType === 1) {
        const made = visit(child);
        if (made !== null) children.push(made);
      }
    }
    if (!flags && !children.length && !inSelect) return null;
    const attributes = {};
    for (const name of KEPT) {
      const value = element.getAttribute(name);
      if (value !== null) attributes[name] = value.slice(0, 2000);
    }
    const box = first ? [Math.round(first.left), Math.round(first.top), Math.round(first.width), Math.round(first.height)] : null;
    return [tag.toLowerCase(), attributes, index, flags, box, held(element, tag), children];
  };
  const tree = visit(document.documentElement) || ["html", {}, 0, 1, null, null, []];
  const page = { probe: PROBE, tree, url: location.href, title: document.title, truncated };
  if (!options.live) return JSON.stringify({ ...page, centres });
  return { elements, data: JSON.stringify(page) };
}
