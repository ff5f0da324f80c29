"""A Sphinx extension for the HTML of all pages: they read with the network off.

Maths becomes MathML when the book is built, by docutils' own converter. A command that it does not
know is a warning, which fails the build. The code runner that Jupyter Book prepares on each page,
and loads from a public host, is taken out. Each page describes itself to search engines and link
previews by its first words. Two addresses in _config.yml add to that: a repository's turns on links
to the source and to a new issue, the site's gives link previews the cover.
"""

from __future__ import annotations

import html
import posixpath
import re
import textwrap
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html import HTML5Translator

logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer, which `html_math_renderer: mathml` selects, and what edits a page."""
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math_block, None))
    app.connect("config-inited", _link_repository)
    app.connect("html-page-context", _drop_thebe, priority=900)
    app.connect("html-page-context", _describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _visit_math(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(_mathml(node, as_block=True) + "</div>\n")
    raise nodes.SkipNode


def _mathml(node: nodes.Element, as_block: bool) -> str:
    # A display in an AMS environment is, for the converter, `aligned` within a display.
    latex = re.sub(r"(\\(?:begin|end)\{)align\*?\}", r"\1aligned}", node.astext())
    latex = re.sub(r"\\(?:begin|end)\{equation\*?\}", "", latex)
    latex = re.sub(r"\\dots\b", r"\\ldots", latex)
    try:
        mathml = tex2mathml(latex, as_block=as_block)
    except MathError as error:
        logger.warning("maths not converted: %s in %s", error, latex, location=node)
        return f"<code>{html.escape(latex)}</code>"
    # As TeX does, set a thin space between log and x, and none between log and a parenthesis.
    return re.sub(
        r"<mo>(&ApplyFunction;</mo>)(?!\s*<mo[^>]*>[(\[{])", r'<mo rspace="0.167em">\1', mathml
    )


def _link_repository(app: Sphinx, config: Config) -> None:
    linked = bool(config.html_theme_options.get("repository_url"))
    config.html_theme_options.update(use_edit_page_button=linked, use_issues_button=linked)


def _drop_thebe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    for kind in ("script_files", "css_files"):
        context[kind] = [
            asset
            for asset in context[kind]
            if "thebe" not in f"{asset.filename} {asset.attributes.get('body')}"
        ]


def _describe(
    app: Sphinx,
    pagename: str,
    templatename: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    if doctree is None:  # the search page, the index
        return
    paragraphs = (node.astext() for node in doctree.findall(nodes.paragraph))
    words = textwrap.shorten(" ".join(paragraphs), width=200, placeholder=" ...")
    title = next(doctree.findall(nodes.title)).astext()
    tags = {"description": words, "og:description": words, "og:title": title}
    tags |= {"og:type": "article", "og:site_name": app.config.html_title}
    if site := app.config.html_baseurl:
        image = posixpath.join(site, "_static/cover.png")
        tags |= {"og:url": context["pageurl"], "og:image": image}
    for name, content in tags.items():
        kind = "property" if name.startswith("og:") else "name"
        context["metatags"] += f'<meta {kind}="{name}" content="{html.escape(content)}">\n'
