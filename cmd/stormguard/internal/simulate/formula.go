// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"time"
)

// What a row's fault is said to cost, in percent of the rate, is made of what the
// row and the limiter are made of, and of no measured figure. What is measured must
// be within it and reach 30 % of it, in the row and where the row is changed.

// The limiter's and the session's constants that the formulas are made of.
const (
	ppm     = 500e-6 // minted less by every node: its clock may be that fast
	floor   = 2 * time.Millisecond
	oneWay  = linkBase + linkJitter // the mean
	minPace = 2 * time.Millisecond  // between two steps of a key: a tenth of a refill, but
	maxPace = 50 * time.Millisecond
	notice  = 20 * time.Millisecond // until it is sure that a demand is over: two windows of the forecast
)

// pace is the time between two steps of a key.
func (sc *scenario) pace() time.Duration {
	return min(max(time.Duration(float64(sc.burstTokens)/sc.rate*1e9/10), minPace), maxPace)
}

// judged is how long a window is.
func (sc *scenario) judged() time.Duration { return min(window, sc.to-sc.from) }

// share is a node's part of the limit.
func (sc *scenario) share() float64 { return 1 / float64(sc.nodes) }

// states is a formula, and what it does not say may not be.
func (sc *scenario) states(cost float64, why string) {
	sc.gate, sc.formula, sc.formulaWhy, sc.maxError = Printed, cost, why, 0
}

// rotationCost is for a load that is all at one node, and after every at another.
//
// Nothing of the rate is lost, if two things hold. The caps of those who lend,
// which are B/R of their mint, hold what they mint until the node that was hot has
// noticed that it is not, and has said what it returns. And the node that is hot
// catches up within its turn, with what demand there is above the rate: it does
// not have the others' mint for one loop, from needing to having, and needs
// (1-s)·loop/(φ-1) to use it. Then a window can lack only what the others minted in
// the last loop of it: (1-s)·loop of its length, and the worst window ends in the
// slowest of its turns. Its delay exceeds ln(100·turns) times the jitter in one run of
// a hundred. ok tells whether both hold, with the ln(turns) of a usual run; where they
// do not, caps fill in each turn, and there is no formula.
func (sc *scenario) rotationCost(every time.Duration) (cost float64, why string, ok bool) {
	W := sc.judged()
	turns := W.Seconds() / every.Seconds()
	within := func(runs float64) time.Duration {
		return max(floor, sc.floor) + linkBase + time.Duration(float64(linkJitter)*math.Log(runs*turns))
	}
	hop := within(1)
	usual, loop := 2*(sc.pace()+hop).Seconds(), 2*(sc.pace()+within(100)).Seconds()
	others := 1 - sc.share()
	refill := float64(sc.burstTokens) / sc.rate
	ok = refill > (notice+sc.pace()+hop).Seconds() && every.Seconds() > usual*(1+others/(demand-1))
	cost = -100 * (ppm + others*loop/W.Seconds())
	return cost, fmt.Sprintf("500 ppm, and (1-1/N)·C of a window's 10 s, C = 2·(pace + floor + delay) = %.0f ms from needing to having, in the slowest of its turns in 99 of 100 runs", 1e3*loop), ok
}

// burstLossCost is for a load at one node at a time, over links each of which is
// by turns good and bad, for exponential times of means g and b.
//
// A lender mints until what it minted and has not been accounted for fills its cap:
// until its age is B/R. It is accounted for when it came through to the borrower,
// was used, and that came through to the lender. Without a bad link that takes
// C = pace + 2·(floor + delay), half a pace and a floor and a delay each way. What
// is left, S = B/R - C, has to do for the two links. The way there is a queue: it
// grows by 1 while the link is bad, and falls by δ while it is good, since the
// borrower uses loans before its own tokens and so has φ-(1-s) to spare for a
// lender's s. It is longer than x with probability a·exp(-ηx), a = p·(1+1/δ),
// η = 1/b - 1/(gδ), p = b/(g+b) (Anick, Mitra and Sondhi, Stochastic theory of a
// data-handling system with multiple sources, 1982, with one source). The way back
// is no queue, as one report accounts for all: it has been bad for longer than x
// with probability p·exp(-x/b). P is the probability that the sum exceeds S. The
// queue has no end here, and in truth ends at the cap: so P is too large, by a
// factor of up to two where much is lost.
//
// On top of the mean (1-s)·P: two standard deviations of a window, since it is few
// and long outages that exceed S, each by 1/η on average; and what lies at the
// lenders when the window ends, at most their caps, and no more than the longest
// outage of the run keeps there.
func (sc *scenario) burstLossCost() (cost float64, why string) {
	g, b := sc.burst.Good.Seconds(), sc.burst.Bad.Seconds()
	s, W := sc.share(), sc.judged().Seconds()
	hop := max(floor, sc.floor) + oneWay
	loop := (sc.pace() + 2*hop).Seconds()
	refill := float64(sc.burstTokens) / sc.rate
	S := max(0, refill-loop)

	p := b / (g + b)
	d := (demand - (1 - s)) / s
	a, eta := p*(1+1/d), 1/b-1/(g*d)
	there, back := math.Exp(-eta*S), math.Exp(-S/b)
	P := min(1, (1-p)*a*there+p*(back+a/(b*(1/b-eta))*(there-back)))

	mean := (1 - s) * P
	spread := 2 * s * math.Sqrt(float64(sc.nodes-1)*2*P/(eta*W))
	longest := loop + b*math.Log(sc.length.Seconds()/(g+b))
	edge := (1 - s) * min(refill, longest) / W
	return -100 * (ppm + mean + spread + edge), fmt.Sprintf(
		"500 ppm; (1-1/N)·P = %.1f %%, P that what a lender has out is older than its cap, B/R; twice the deviation of a window, %.1f %%; caps at its end, %.2f %%",
		100*mean, 100*spread, 100*edge)
}

// saturationCost is for a limit all of whose nodes are asked, all the time, for
// times as much as they mint.
//
// Nothing is lost, but what a node has is less than a token most of the time, and
// of the rest it keeps some until it is asked for. The whole tokens at a node are
// a queue D/M/1, tokens being who arrives and messages who serves: n ≥ 1 of them
// with probability (1-σ)·σⁿ⁻¹/φ, σ = exp(-φ(1-σ)). The part of the next one is
// uniform. Between a window's beginning and its end all of them together change by
// √(2N) such deviations, either way. As many windows are looked at as tokens are
// minted at a node while a window slides, for each key: what the worst of them
// exceeds in one run of a hundred is √(2·ln(100·windows)) deviations.
//
// It takes that nodes lend to each other, which they do up to a demand of some
// three times the limit, or all of them would have the same part of a token at the
// same time; and that the ideal bucket is spent by the time it is looked at, after
// B/((φ-1)·R).
func (sc *scenario) saturationCost(times float64) (cost float64, why string, ok bool) {
	sigma := 0.
	for range 200 {
		sigma = math.Exp(-times * (1 - sigma))
	}
	mean := 1 / times / (1 - sigma)
	variance := 1/times*(1+sigma)/((1-sigma)*(1-sigma)) - mean*mean + 1./12
	slides := (sc.to - sc.from - sc.judged()).Seconds() * sc.rate * sc.share()
	worst := math.Sqrt(2 * math.Log(100*float64(max(1, sc.hot))*(1+slides)))
	tokens := worst * math.Sqrt(2*float64(sc.nodes)*variance)
	ok = times <= 3 && float64(sc.burstTokens)/((times-1)*sc.rate) < sc.from.Seconds()
	return 100 * (ppm + tokens/(sc.rate*sc.judged().Seconds())), fmt.Sprintf(
		"either way: 500 ppm, and %.1f deviations, %.0f tokens, of what %d nodes keep of their own until it is asked for", worst, tokens, sc.nodes), ok
}
