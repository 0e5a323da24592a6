"""The restart report as a picture.

Knows what is drawn where; the drawing is ``kvtide.demo.picture``'s.
"""

from pathlib import Path

from kvtide.demo.picture import STYLE, draw_by_length, draw_spread
from kvtide.demo.restart_report import LABELS, RestartReport, headline


def write_picture(report: RestartReport, path: Path) -> None:
    """Draw times to first token after the restart into the PNG file ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, (length, spread) = pyplot.subplots(
            1, 2, figsize=(12, 5), width_ratios=[1.35, 1], layout="constrained"
        )
        figure.suptitle(headline(report), x=0.01, ha="left", fontweight="bold")
        draw_by_length(length, report.exchanges, LABELS)
        draw_spread(spread, report.exchanges, LABELS)
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)
