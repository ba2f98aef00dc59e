"""Names of losses and data sets, and the factories behind them. Imports the standard library only."""
