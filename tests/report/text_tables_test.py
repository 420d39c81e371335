"""Tests of tables in LaTeX and CSV with exact texts."""

from fedjax_pfl.report import text_tables
from fedjax_pfl.report.text_tables import Table

TABLE = Table(
    caption="Accuracy in %",
    heads=["before", "MB", "rounds"],
    rows=[["FedAvg", "81.20 ± 0.40", "1,200", "5"], ["a_b", "81.20 ± 3.00", "95.5", "9"]],
    variants=[["=M_ & %<$^~{}\\>", "79.00", "–", "7"]],
    title="Results",
    best=[1, -1, 0],
)


def test_latex():
    """Ties are all bold, whatever their deviation; a column without direction has no best value."""
    assert (
        text_tables.latex([TABLE])
        == r"""\begin{table}
\centering
\caption{Accuracy in \%}
\footnotesize\setlength{\tabcolsep}{3pt}
\begin{tabular}{lrrr}
\toprule
 & before & MB & rounds \\
\midrule
FedAvg & \textbf{81.20 $\pm$ 0.40} & 1,200 & 5 \\
a\_b & \textbf{81.20 $\pm$ 3.00} & \textbf{95.5} & 9 \\
\midrule
Variants of this library: \\
=M\_ \& \%$<$\$\textasciicircum{}\textasciitilde{}\{\}\textbackslash{}$>$ & 79.00 & -- & 7 \\
\bottomrule
\end{tabular}
\end{table}"""
    )


def test_latex_has_no_greek_letters_that_pdflatex_refuses():
    table = Table("Privacy", ["ε and δ"], [["FedAvg", "ε = 1.5, δ = 1e-05"]])
    text = text_tables.latex([table])
    assert r" & $\varepsilon$ and $\delta$ \\" in text
    assert r"FedAvg & $\varepsilon$ = 1.5, $\delta$ = 1e-05 \\" in text


def test_best_values_are_signed_and_missing_if_nothing_is_better():
    rows = [["a", "-2.00", "3", "–"], ["b", "+1.00", "3", "4"]]
    table = Table("", ["x", "y", "z"], rows, best=[1, 1, 1])
    assert text_tables.best_values(table) == [1.0, None, None]
    assert text_tables.best_values(table._replace(best=[-1, -1, -1])) == [-2.0, None, None]
    assert text_tables.best_values(table._replace(best=())) == [None, None, None]
    assert r"\textbf{$+$1.00}" in text_tables.latex([table])


def test_csv():
    assert (
        text_tables.as_csv(TABLE)
        == """,before,MB,rounds
FedAvg,81.20 ± 0.40,"1,200",5
a_b,81.20 ± 3.00,95.5,9
'=M_ & %<$^~{}\\>,79.00,–,7"""
    )
