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
	keepAlive = 50 * time.Millisecond
	lost      = 200 * keepAlive           // a peer that was silent for so long is lost
	meet      = 5*time.Second + keepAlive // until who is lost is tried again, at most, and has answered
	forecast  = 10 * time.Millisecond     // a window of it
	ppm       = 500e-6                    // minted less by every node: its clock may be that fast
	floor     = 2 * time.Millisecond
	oneWay    = linkBase + linkJitter // the mean
	minPace   = 2 * time.Millisecond  // between two steps of a key: a tenth of a refill, but
	maxPace   = 50 * time.Millisecond
	notice    = 20 * time.Millisecond // until it is sure that a demand is over: two windows of the forecast
)

// pace is the time between two steps of a key.
func (sc *scenario) pace() time.Duration {
	return min(max(time.Duration(float64(sc.burstTokens)/sc.rate*1e9/10), minPace), maxPace)
}

// judged is how long a window is.
func (sc *scenario) judged() time.Duration { return min(window, sc.to-sc.from) }

// share is a node's part of the limit.
func (sc *scenario) share() float64 { return 1 / float64(sc.nodes) }

// slowest is what no packet of a run takes longer than, in 99 runs of 100: of n
// exponential delays the largest exceeds ln(100·n) means in one. n are the packets of
// a fleet that has something to say at each floor.
func (sc *scenario) slowest() time.Duration {
	n := float64(sc.nodes*(sc.nodes-1)) * sc.length.Seconds() / max(floor, sc.floor).Seconds()
	return linkBase + time.Duration(float64(linkJitter)*math.Log(100*n))
}

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

// deafness is for how long two do not hear each other at most, if packets between
// them are lost for the time of a cut and none is lost otherwise: a keep-alive before,
// and after it another, or, where the cut was long enough for them to be lost to each
// other, what it takes to meet.
func deafness(cut time.Duration) time.Duration {
	if cut+keepAlive < lost {
		return cut + 2*keepAlive
	}
	return cut + keepAlive + meet
}

// takenOver is what two sides of a split, P of them, admit more than the limit if
// each takes over the other's rate after a while: P times the rate and not once,
// from then until all hear each other. (P-1)·(B + R·(T-After)), of T the longest
// silence of any pair. What is admitted before the last pair has met is less, since
// each that meets another counts it in.
func (sc *scenario) takenOver(silence time.Duration) float64 {
	return float64(sc.burstTokens) + sc.rate*max(0, silence-sc.silence.After).Seconds()
}

// resumptionCost is for a fleet all of whose load is at one node, which stood still
// until all caps were full, and then goes on for a while.
//
// The ideal bucket is full then as well. It loses nothing, and is empty when the
// window ends; so what is missing is what the fleet could not mint, since caps were
// full, and what it still has at the end.
//
// The lenders mint nothing until what they lent is reported as used: a window until
// the forecast sees that there is a demand, two paces, and three hops, of the need,
// the loan and the report. The node itself mints nothing while it has loans, since
// it spends those first; it was lent (1-s)·B at most, which lasts for (1-s)·B over
// (φ-(1-s))·R, what is asked for less what goes on being lent. At the end a token
// that is lent is on its way for a pace and a hop.
func (sc *scenario) resumptionCost(on time.Duration) (cost float64, why string) {
	s, R, B := sc.share(), sc.rate, float64(sc.burstTokens)
	hop := max(floor, sc.floor) + oneWay
	lenders := (1 - s) * R * (forecast + 2*sc.pace() + 3*hop).Seconds()
	own := s * R * (1 - s) * B / ((demand - (1 - s)) * R)
	way := (1 - s) * R * (sc.pace() + hop).Seconds()
	asked := B + R*on.Seconds()
	return -100 * (ppm + (lenders+own+way)/asked), fmt.Sprintf(
		"500 ppm, and of the %.0f tokens that one bucket has for the %v after it: %.0f that lenders do not mint until the first loans are reported as used, %.0f of its own that it does not mint while it spends loans, %.0f on their way at the end",
		asked, on, lenders, own, way)
}
