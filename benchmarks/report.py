"""Tables and pictures from the JSON files of bench.py, in the terminal and in the documentation.

    python benchmarks/report.py    # shows all, and writes them to docs/performance.md
    python benchmarks/report.py --from FOLDER    # shows what bench.py wrote to another folder

Tables stand between <!-- bench:SECTION --> and <!-- /bench -->, and are never typed by hand.
"""

import argparse
import functools
import importlib.util
import json
import re
from pathlib import Path

import first_step
import measures
import sections

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / "performance.md"]
MARKERS = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


# Tables are lists of rows of texts; the first row is the heading.


def contender_table(section, results):
    """One row for each contender: its time, its ratio to the first of the table, its memory."""
    if section.kind == "memory":
        return memory_table(results)
    if section.kind == "first":
        return first_step_table(results)
    if section.kind == "least":
        return least_table(results)
    if section.kind == "figures":
        return figures_table(results)
    base = section.base
    over = {"": [], "floor": ["over the floor"], "plain": ["over plain Keras"]}
    over["keras"] = ["over Keras' accumulation"]
    over["accumulated"] = ["over plain accumulation"]
    rows = [["contender", "ms", *over[base], "peak MiB", "above start"]]
    for name, contender in results["contenders"].items():
        if "failed" in contender:
            rows.append([contender["label"], f"failed: {contender['failed']}"])
            continue
        times = measures.spread(contender["seconds"])
        ratios = [time_cell(results, name, base)] if base else []
        memory = [measures.peak(results, name).median, measures.growth(results, name).median]
        cells = [f"{1e3 * times.median:.0f}", *ratios, *(f"{each:.0f}" for each in memory)]
        rows.append([contender["label"], *cells])
    return filled(rows)


def memory_table(results):
    rows = [["contender", "peak MiB", "over plain batch 4", "above start"]]
    for name, contender in results["contenders"].items():
        if "failed" in contender:
            rows.append([contender["label"], f"failed: {contender['failed']}"])
            continue
        peak = with_spread(measures.peak(results, name), "{:.0f}")
        growth = f"{measures.growth(results, name).median:.0f}"
        rows.append([contender["label"], peak, peak_cell(results, name), growth])
    return filled(rows)


def first_step_table(results):
    traces = ["forward traces", "graphs made by a second call"]
    rows = [["contender", "processor seconds", "over plain Keras", *traces]]
    for name, contender in results["contenders"].items():
        if "failed" in contender:
            rows.append([contender["label"], f"failed: {contender['failed']}"])
            continue
        seconds = with_spread(measures.spread(contender["seconds"]), "{:.2f}")
        counts = [measures.count(results, name, what) for what in ("traces", "graphs again")]
        ratio = time_cell(results, name, first_step.plain(name))
        rows.append([contender["label"], seconds, ratio, *map(str, counts)])
    return filled(rows)


def least_table(results):
    """One row for each contender: the least of each figure, and over the plain contender's."""
    calls = first_step.CALLS
    rows = [["contender", *(cell for c in calls for cell in (f"{c}, seconds", "over plain Keras"))]]
    for name, contender in results["contenders"].items():
        if "failed" in contender:
            rows.append([contender["label"], f"failed: {contender['failed']}"])
            continue
        cells = [contender["label"]]
        for call in calls:
            ratio = available(measures.least_ratio, results, name, first_step.plain(name), call)
            cells += [f"{min(contender[call]):.2f}", with_spread(ratio, "{:.2f}")]
        rows.append(cells)
    return filled(rows)


def figures_table(results):
    """One row for each contender: the medians of what it has found."""
    contenders = results["contenders"].values()
    names = {"label", "versions", "failed"}
    figures = list(dict.fromkeys(f for each in contenders for f in each if f not in names))
    rows = [["contender", *figures]]
    for each in contenders:
        if "failed" in each:
            rows.append([each["label"], f"failed: {each['failed']}"])
            continue
        cells = [f"{measures.spread(each[figure]).median:.4g}" for figure in figures]
        rows.append([each["label"], *cells])
    return filled(rows)


def time_cell(results, name, base):
    return with_spread(available(measures.time_ratio, results, name, base), "{:.2f}")


def peak_cell(results, name):
    return with_spread(available(measures.peak_ratio, results, name, "plain 4"), "{:.2f}")


def available(figure, *arguments):
    """A figure, or a dash where a contender that it needs is missing or has failed."""
    try:
        return figure(*arguments)
    except KeyError:
        return "-"


def target_table(section, results):
    rows = [["target", "limit", "measured", "verdict"]]
    for target in section.targets:
        sign = "at least" if target.at_least else "at most"
        has_limit = target.limit is not None
        limit = f"{sign} {target.form.format(target.limit)}" if has_limit else "shown"
        try:
            value = target.value(results)
        except KeyError:
            rows.append([target.text, limit, why_not(section, results), ""])
            continue
        rows.append([target.text, limit, with_spread(value, target.form), verdict(target, value)])
    return rows


def why_not(section, results):
    failed = any("failed" in contender for contender in results["contenders"].values())
    without_peers = len(results["contenders"]) < len(section.contenders)
    return (
        "a contender failed" if failed and not without_peers else "not measured (make bench-peers)"
    )


def verdict(target, value):
    """Whether the median meets the target, and if not, by how much it is missed."""
    if target.limit is None:
        return ""
    median = value.median if isinstance(value, measures.Spread) else value
    if target.met(median):
        return "met"
    return f"**MISSED** by {target.form.format(abs(median - target.limit))}"


def with_spread(value, form):
    if isinstance(value, measures.Spread):
        low, high = form.format(value.low), form.format(value.high)
        return f"{form.format(value.median)} ({low} to {high})"
    return value if isinstance(value, str) else form.format(value)


def filled(rows):
    """Rows of the same length."""
    return [row + [""] * (len(rows[0]) - len(row)) for row in rows]


def markdown(rows):
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def aligned(rows):
    """The table for a terminal. A failure may be long, so it widens no column."""
    shown = [row for row in rows if not any(cell.startswith("failed") for cell in row)]
    widths = [max(map(len, column)) for column in zip(*shown)]
    widths[0] = max(len(row[0]) for row in rows)
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# The summary of the page


def summary(all_results):
    """Time over the floor and peak memory, in the words of the page."""
    columns = {"macrobatch": "macrobatch", "keras": "Keras `gradient_accumulation_steps`"}
    columns["plain"] = "plain Keras, whole batch"
    rows = [["", *columns.values()]]
    for name in ("cnn", "transformer", "mlp", "transformer-compiled", "mlp-compiled"):
        if name in all_results:
            title = sections.all_sections()[name].title.split(":")[0]
            cells = [time_cell(all_results[name], each, "floor") for each in columns]
            rows.append([f"{title}: time over the floor", *cells])
    if "memory" in all_results:
        cells = [peak_cell(all_results["memory"], f"{each} 256") for each in columns]
        rows.append(["larger transformer, batch 256: peak memory over plain batches of 4", *cells])
    return rows


# Pages


def described(results):
    """The machine, the versions and the date of some results, as a sentence."""
    machine = results["machine"]
    versions = {}
    for contender in results["contenders"].values():
        for name, version in contender.get("versions", {}).items():
            versions.setdefault(name, [])
            versions[name] += [version] if version not in versions[name] else []
    found = ", ".join(f"{name} {' and '.join(each)}" for name, each in versions.items())
    return (
        f"{machine['CPU']}, {machine['cores']} cores, {machine['memory in GiB']} GiB, "
        f"{machine['system']}. {found}. {results['rounds']} rounds, {results['date']}."
    )


def section_text(section, results):
    picture = f"![{section.title}](../benchmarks/results/{section.name}.png)"
    tables = [markdown(contender_table(section, results)), markdown(target_table(section, results))]
    return "\n\n".join([*tables, picture, f"Measured on: {described(results)}"])


def with_tables(page, texts):
    """The page, with the text of each pair of markers replaced where there is a new one."""

    def replaced(match):
        text = texts.get(match[2])
        return match[0] if text is None else f"{match[1]}\n{text}\n\n{match[3]}"

    return MARKERS.sub(replaced, page)


def write_pages():
    """Writes all tables again, from the results there are."""
    texts, all_results = {}, {}
    for name, section in sections.all_sections().items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            all_results[name] = json.loads(path.read_text())
            texts[name] = section_text(section, all_results[name])
    texts["summary"] = markdown(summary(all_results))
    for page in PAGES:
        page.write_text(with_tables(page.read_text(), texts))


def show(section, results, folder):
    """The tables in the terminal, and the picture in the folder."""
    for rows in (contender_table(section, results), target_table(section, results)):
        print("\n" + aligned(rows).replace("**", ""))
    print(flush=True)
    if check_pictures():
        import pictures

        pictures.draw(section, results, folder / f"{section.name}.png")


@functools.lru_cache
def check_pictures():
    """Whether pictures can be made; if not, says so once. Tables do without matplotlib."""
    can = importlib.util.find_spec("matplotlib") is not None
    if not can:
        print("No pictures: they need matplotlib, which make bench installs.", flush=True)
    return can


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="folder", type=Path, default=RESULTS, metavar="FOLDER")
    folder = parser.parse_args().folder
    for name, section in sections.all_sections().items():
        path = folder / f"{name}.json"
        if path.exists():
            show(section, json.loads(path.read_text()), folder)
    if folder.resolve() == RESULTS:
        write_pages()


if __name__ == "__main__":
    main()
