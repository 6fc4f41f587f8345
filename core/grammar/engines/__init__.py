"""Grammar engines behind one protocol: DFA, pushdown automaton, unique items, and llguidance.

One engine serves a constraint. Of 781 public schemas 75 % run as a pushdown automaton, 18 % as a DFA and 4 % in
llguidance, which also runs Lark and EBNF grammars; 12 % wrap their engine in the check of unique items. A mask costs
about 10 us, and a lookup where it is memoised.
"""
