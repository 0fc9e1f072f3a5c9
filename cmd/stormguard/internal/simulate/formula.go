// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"time"
)

// A formula states the cost of a row's fault, in percent of the rate. It uses only the
// settings of the row and the constants of the limiter, no measured figure. The measured
// cost must be between 30 % and 100 % of the formula, also when the row is changed.

// Constants of the limiter and of the session that the formulas use.
const (
	keepAlive = 50 * time.Millisecond
	lost      = 200 * keepAlive           // after this silence a peer counts as lost
	meet      = 5*time.Second + keepAlive // at most until a lost peer is tried again and has answered
	forecast  = 10 * time.Millisecond     // one window of the forecast
	ppm       = 500e-6                    // each node mints this part less: its clock may be fast by as much
	floor     = 2 * time.Millisecond
	oneWay    = linkBase + linkJitter // mean delay of a packet
	minPace   = 2 * time.Millisecond  // least time between two steps of a key, which is a tenth of a refill
	maxPace   = 50 * time.Millisecond // most time between two steps of a key
	notice    = 20 * time.Millisecond // until the end of a demand is sure: two windows of the forecast
)

// pace is the time between two steps of a key.
func (sc *scenario) pace() time.Duration {
	return min(max(time.Duration(float64(sc.burstTokens)/sc.rate*1e9/10), minPace), maxPace)
}

// judged is the length of a judged window.
func (sc *scenario) judged() time.Duration { return min(window, sc.to-sc.from) }

// share is a node's part of the limit.
func (sc *scenario) share() float64 { return 1 / float64(sc.nodes) }

// slowest is the delay that no packet exceeds in 99 of 100 runs. The largest of n
// exponential delays exceeds ln(100·n) means in one run of 100. n counts the packets of a
// fleet that sends at each floor.
func (sc *scenario) slowest() time.Duration {
	n := float64(sc.nodes*(sc.nodes-1)) * sc.length.Seconds() / max(floor, sc.floor).Seconds()
	return linkBase + time.Duration(float64(linkJitter)*math.Log(100*n))
}

// states sets the formula of a row, and allows no error beyond the formula.
func (sc *scenario) states(cost float64, why string) {
	sc.gate, sc.formula, sc.formulaWhy, sc.maxError = Printed, cost, why, 0
}

// rotationCost is the cost of a load that is all at one node, and moves to another node
// after each duration every.
//
// The fleet loses nothing of the rate, if two conditions hold:
//
//   - A lender's cap is B/R of its mint. It holds the lender's tokens until the previous
//     hot node has noticed that its demand is over, and has said what it returns.
//   - The hot node catches up within its turn, by the demand above the rate. It lacks the
//     others' mint for one loop, from the need to the loan, and takes (1-s)·loop/(φ-1) to
//     use it.
//
// Then a window can lack only the others' mint of its last loop: (1-s)·loop of its length.
// The worst window ends in the slowest of its turns. The delay of that turn exceeds
// ln(100·turns) times the jitter in one run of a hundred. ok tells whether both conditions
// hold, with the ln(turns) of a usual run. If not, caps fill in each turn, and there is no
// formula.
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

// burstLossCost is the cost of a load at one node at a time. Each link is by turns good
// and bad, for exponential times of means g and b.
//
// A lender stops minting when its cap is full of unreported tokens: when the oldest has
// the age B/R. A token is reported when the borrower got it and used it, and the lender
// heard so. Over good links this takes C = pace + 2·(floor + delay): each way half a pace,
// a floor and a delay. The two links may add S = B/R - C.
//
// The way to the borrower is a queue. It grows by 1 while the link is bad. It falls by δ
// while the link is good: the borrower uses loans before its own tokens, and so has φ-(1-s)
// to spare for a lender's s. The queue is longer than x with probability a·exp(-ηx),
// a = p·(1+1/δ), η = 1/b - 1/(gδ), p = b/(g+b) (Anick, Mitra and Sondhi, Stochastic theory
// of a data-handling system with multiple sources, 1982, with one source). The way back is
// no queue, as one report accounts for all tokens. It has been bad for longer than x with
// probability p·exp(-x/b).
//
// P is the probability that the sum exceeds S. The real queue ends at the cap, this one
// has no end. So P is too large, by a factor of up to two where much is lost.
//
// The cost is the mean (1-s)·P plus two terms. The first is two standard deviations of a
// window: few and long outages exceed S, each by 1/η on average. The second is the tokens
// at the lenders when the window ends: at most their caps, and at most the mint of the
// longest outage of the run.
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

// saturationCost is the cost of a limit whose nodes all have a demand of times their mint,
// all the time.
//
// No token is lost. But a node has less than one token most of the time, and keeps the
// others until a message asks for them. The whole tokens at a node are a queue D/M/1:
// tokens arrive, and messages serve them. There are n ≥ 1 tokens with probability
// (1-σ)·σⁿ⁻¹/φ, σ = exp(-φ(1-σ)). The part of the next token is uniform. Between the begin
// and the end of a window all nodes together change by √(2N) such deviations, up or down.
// For each key the number of windows is the number of tokens that a node mints while a
// window slides. In one run of a hundred the worst window exceeds √(2·ln(100·windows))
// deviations.
//
// The formula has two conditions, and ok tells whether both hold. Nodes lend to each other,
// as they do up to a demand of about three times the limit: else all of them would have the
// same part of a token at the same time. And the ideal bucket is spent when judging begins:
// this takes B/((φ-1)·R).
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

// deafness is the longest silence between two nodes, if a cut drops all packets between
// them and no other packet is lost. It is the cut, a keep-alive before and another one
// after. If the cut is so long that the nodes are lost to each other, the time to meet
// again replaces the second keep-alive.
func deafness(cut time.Duration) time.Duration {
	if cut+keepAlive < lost {
		return cut + 2*keepAlive
	}
	return cut + keepAlive + meet
}

// takenOver is the number of tokens that the P = 2 sides of a split admit above the limit.
// Each side takes over the other's rate after silence.After. From then until all nodes hear
// each other the fleet has P times the rate. The formula is (P-1)·(B + R·(T-After)), with T
// the longest silence of any pair. The true number is lower: nodes that have met count each
// other before the last pair has met.
func (sc *scenario) takenOver(silence time.Duration) float64 {
	return float64(sc.burstTokens) + sc.rate*max(0, silence-sc.silence.After).Seconds()
}

// resumptionCost is the cost of a stop, for a fleet with all its load at one node. The
// node stood still until all caps were full, and then runs for the time on.
//
// The ideal bucket is full after the stop as well. It loses nothing, and is empty when the
// window ends. So the fleet lacks the tokens that it could not mint with full caps, and
// the tokens that it still has at the end.
//
// The lenders mint nothing until their loans are reported as used. This takes a window
// until the forecast sees the demand, two paces, and three hops: of the need, the loan and
// the report. The node itself mints nothing while it has loans, since it spends them
// first. It has at most (1-s)·B of loans. They last for (1-s)·B over (φ-(1-s))·R, the
// demand less the further loans. At the end a lent token is on its way for a pace and a
// hop.
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
