"""The colours of all charts."""

#: Okabe and Ito's colours for the colour-blind, without black and yellow, which a background may
#: hide.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#A6761D")
