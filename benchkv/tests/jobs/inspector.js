// Runs around pages of benchkv report, in frames: finds what a reader would stumble over.
'use strict';
const found = { errors: [], views: [] };
const note = (event) => found.errors.push(String(event.message || event.reason || event));
window.addEventListener('error', note);

const shown = (box) => `${box.name} at ${Math.round(box.left)},${Math.round(box.top)}`;
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5;

// CIE L*a*b* of a colour as the browser computed it.
const lab = (colour) => {
    const [r, g, b] = colour.match(/\d+/g).slice(0, 3).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    const f = (t) => (t > 0.008856 ? Math.cbrt(t) : 7.787 * t + 16 / 116);
    const [x, y, z] = [(0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089].map(f);
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
};

function chartOf(figure, complain) {
    const svg = figure.querySelector('svg.chart');
    const title = figure.querySelector('figcaption').firstChild.textContent;
    const about = (what) => complain(`${title}: ${what}`);
    for (const axis of ['x-title', 'y-title']) {
        const text = svg.querySelector(`.${axis}`);
        if (!text || !/\(.+\)$/.test(text.textContent)) about(`no unit in ${axis}: ${text && text.textContent}`);
    }
    const area = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll('text')].map((text) => {
        const { left, right, top, bottom } = text.getBoundingClientRect();
        return { name: text.textContent, left, right, top, bottom };
    });
    boxes.forEach((box, at) => {
        if (box.left < area.left - 1 || box.right > area.right + 1 || box.top < area.top - 1 || box.bottom > area.bottom + 1) about(`outside: ${shown(box)}`);
        boxes.slice(0, at).filter((other) => overlap(box, other)).forEach((other) => about(`${shown(box)} overlaps ${shown(other)}`));
    });
    const view = figure.ownerDocument.defaultView;
    const series = [...svg.querySelectorAll('g.series')];
    const looks = series.map((group) => {
        const style = view.getComputedStyle(group);
        const line = group.querySelector('polyline');
        return { colour: style.stroke === 'none' ? style.fill : style.stroke, dash: line ? line.getAttribute('stroke-dasharray') : '' };
    });
    looks.forEach((one, at) => looks.slice(0, at).forEach((other) => {
        const [a, b] = [lab(one.colour), lab(other.colour)];
        const distance = Math.hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
        if (distance < 35 && one.dash === other.dash) about(`series alike: ${one.colour} and ${other.colour}`);
    }));
    const entries = [...figure.querySelectorAll('ul.legend li')];
    const names = entries.map((entry) => entry.textContent);
    if (new Set(names).size !== names.length) about(`equal names in the legend: ${names}`);
    if (names.join('\n') !== series.map((group) => group.querySelector('title').textContent).join('\n')) about(`legend and series differ: ${names}`);
    return { title, series: series.length, legend: entries.length };
}

window.addEventListener('load', () => {
    for (const frame of document.querySelectorAll('iframe')) {
        const page = frame.contentDocument;
        const width = frame.contentWindow.innerWidth;
        const complaints = [];
        const complain = (what) => complaints.push(what);
        frame.contentWindow.addEventListener('error', note);
        if (page.scripts.length) found.errors.push('the page has a script');
        if (page.documentElement.scrollWidth > width) complain(`the page is ${page.documentElement.scrollWidth} wide`);
        for (const element of page.querySelectorAll('h1, h2, p, dl, ul, li, figure, figcaption, svg, .scroll')) {
            const { left, right } = element.getBoundingClientRect();
            if (left < -1 || right > width + 1) complain(`outside of the page: ${element.tagName} ${element.textContent.slice(0, 40)}`);
        }
        const charts = [...page.querySelectorAll('figure')].map((figure) => chartOf(figure, complain));
        found.views.push({ width, complaints, charts, text: page.body.innerText });
    }
    const pre = document.createElement('pre');
    pre.textContent = JSON.stringify(found);
    document.body.replaceChildren(pre);
});
