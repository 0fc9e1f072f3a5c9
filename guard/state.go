// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/statefile"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// A Guard with a Config.StateDir writes the breakers, and all that a source inherits from
// its previous epoch, to a file. So a process that is killed and started again goes on
// where it was. A second process with the same directory is refused.

const (
	// saveSoon is the shortest time between two writes. A change that must not be lost,
	// such as a spent credit, waits no longer: a restart forgets all unwritten changes.
	saveSoon = 100 * time.Millisecond
	// saveEvery is the longest time from any other change to its write.
	saveEvery = time.Second
	// saveAnew is how old the file may get while messages move or wait, unless it is
	// empty: the next process takes the age of the file for the age of its content.
	saveAnew = 10 * time.Second

	// stateFresh is how old the file may be for an open period in it to go on.
	stateFresh = 30 * time.Second

	// maxSavedFailures bounds the number of failed messages in the file.
	maxSavedFailures = 16384
	// maxSavedText bounds each text of a failure in the file, in bytes.
	maxSavedText = 256

	// maxLooks is how often one write may collect the sources again.
	maxLooks = 10
)

// savedState is the document. The clock of the Guard that reads it goes on where the clock
// of the Guard that wrote it would be now. So both mean the same by an instant.
type savedState struct {
	Clock time.Duration   `json:"clock"`
	State json.RawMessage `json:"state"` // savedParts
}

type savedParts struct {
	Group   string                 `json:"group"`
	Scopes  []circuit.SavedScope   `json:"scopes,omitempty"`
	Sources map[string]savedSource `json:"sources,omitempty"`
	Rules   []savedRule            `json:"rules,omitempty"` // rules of the Guard's own quarantine
}

// savedRule is the written form of a dlq.QuarantineEntry. Rule is its text, as bytes: a key
// need not be UTF-8.
type savedRule struct {
	Rule  []byte    `json:"rule"`
	By    string    `json:"by,omitempty"`
	Why   string    `json:"why,omitempty"`
	At    time.Time `json:"at"`
	Until time.Time `json:"until"`
}

// savedSource is the written form of carryOver.
type savedSource struct {
	At        time.Duration           `json:"at,omitempty"` // when the source ended; 0 for an open source
	Budget    *credit.Saved           `json:"budget,omitempty"`
	BudgetOf  savedBudgetConfig       `json:"budget_of,omitzero"`
	Guesses   int                     `json:"guesses,omitempty"`
	GuessedAt time.Duration           `json:"guessed_at,omitempty"`
	Paused    bool                    `json:"paused,omitempty"`
	PauseEnds time.Duration           `json:"pause_ends,omitempty"`
	Asked     time.Duration           `json:"asked,omitempty"`
	AskedFor  string                  `json:"asked_for,omitempty"`
	Storm     *storm.Saved            `json:"storm,omitempty"`
	Failed    map[string]savedFailure `json:"failed,omitempty"`
	Flaky     savedFlakiness          `json:"flaky,omitzero"` // the flakiness by which Failed are judged
}

// savedFlakiness is the written form of flakiness.
type savedFlakiness struct {
	Recovered float64       `json:"recovered"`
	All       float64       `json:"all"`
	Relapses  float64       `json:"relapses"`
	At        time.Duration `json:"at"`
}

// savedBudgetConfig is the written form of dlq.BudgetConfig.
type savedBudgetConfig struct {
	Earn             float64       `json:"earn,omitempty"`
	Balance          float64       `json:"balance,omitempty"`
	FreeEvery        time.Duration `json:"free_every,omitempty"`
	PermanentEarn    float64       `json:"permanent_earn,omitempty"`
	PermanentBalance float64       `json:"permanent_balance,omitempty"`
	Off              bool          `json:"off,omitempty"`
}

// savedFailure is the written form of a suspect, with its first and its latest attempt. The
// lifeAtFailure of a suspect is left out: all successes of the next process come later.
type savedFailure struct {
	Tries       int            `json:"tries"`
	Attempts    int            `json:"attempts"`
	After       int            `json:"after,omitempty"`
	AfterAt     time.Duration  `json:"after_at,omitempty"`
	LastWord    bool           `json:"last_word,omitempty"`
	WordAt      time.Duration  `json:"word_at,omitempty"`
	FirstFailed time.Duration  `json:"first_failed"`
	At          time.Duration  `json:"at,omitempty"` // when the message went back to the broker; 0 if it was here
	Parked      bool           `json:"parked,omitempty"`
	Failures    []savedAttempt `json:"failures,omitempty"`
}

type savedAttempt struct {
	N       int           `json:"n"`
	At      time.Duration `json:"at"`
	Type    string        `json:"type,omitempty"`
	Message string        `json:"message,omitempty"`
}

// saver writes the state of a Guard. Its goroutine ends with the Guard; Close writes once
// more.
type saver struct {
	g     *Guard
	dir   string
	moved chan struct{} // holds a token when something may have changed; capacity 1
	spent chan struct{} // holds a token when something changed that must not be lost; capacity 1
	done  chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex      // guards the fields below; Guard.mu and Source.mu are taken under it
	file    *statefile.File // nil once it is closed: another process may have it
	last    []byte          // savedState.State at the latest write
	written time.Duration   // when last was written
	failing bool            // the latest write failed
}

// openState reads the state of the previous process, and takes it over. It sets the clock,
// so nothing may read the clock before.
func (g *Guard) openState() error {
	if g.cfg.StateDir == "" {
		return nil
	}
	file, found, err := statefile.Open(g.cfg.StateDir, g.host)
	if err != nil {
		return fmt.Errorf("guard: Config.StateDir: %w", err)
	}
	g.saver = &saver{g: g, dir: g.cfg.StateDir, moved: make(chan struct{}, 1), spent: make(chan struct{}, 1), done: make(chan struct{}), file: file}
	switch {
	case found.Damage != nil:
		g.log.Warn("the state of the process before is damaged: this one begins without", "dir", g.cfg.StateDir, "damage", found.Damage, "set_aside", found.Aside)
	case found.Body != nil:
		if err := g.takeUp(found); err != nil {
			g.log.Warn("the state of the process before is not taken up: this one begins without", "dir", g.cfg.StateDir, "error", err)
		}
	}
	return nil
}

// takeUp keeps the content of a document for the sources and breakers that are opened later.
func (g *Guard) takeUp(found statefile.Document) error {
	var doc savedState
	var parts savedParts
	if err := json.Unmarshal(found.Body, &doc); err != nil {
		return err
	}
	if err := json.Unmarshal(doc.State, &parts); err != nil {
		return err
	}
	if parts.Group != g.cfg.Group {
		return fmt.Errorf("it is of group %q, this is %q", parts.Group, g.cfg.Group)
	}
	if doc.Clock < 0 || doc.Clock > never/2 {
		return fmt.Errorf("its clock shows %v", doc.Clock)
	}
	now, clock := doc.Clock+found.Age, g.now
	start := clock()
	g.now = func() time.Duration { return now + clock() - start }
	for _, sc := range parts.Scopes {
		if !found.Sure && !sc.Forced && sc.State == breaker.Open {
			sc.State = breaker.HalfOpen
		}
		sc.At = cmp.Or(sc.At, doc.Clock)
		if !goneScope(now, sc) {
			g.restored[scopeKey(sc.Path)] = sc
		}
	}
	for name, s := range parts.Sources {
		s.At = cmp.Or(s.At, doc.Clock)
		for id, f := range s.Failed {
			f.At = cmp.Or(f.At, doc.Clock)
			s.Failed[id] = f
		}
		if k := s.kept(now); now-k.at < keepFor || k.paused && now < k.pauseEnds {
			g.kept[name] = k
		}
	}
	rules := g.takeUpRules(parts.Rules)
	g.log.Info("the state of the process before is taken up", "dir", g.cfg.StateDir,
		"sources", len(g.kept), "scopes", len(g.restored), "rules", rules, "age", found.Age, "age_known", found.Sure, "written", found.Wall)
	return nil
}

// takeUpRules adds the rules that have not ended to the quarantine, and returns how many it
// added. A shared list is not changed: others may have removed a rule from it.
func (g *Guard) takeUpRules(all []savedRule) (taken int) {
	if g.ownRules == nil {
		if len(all) > 0 {
			g.log.Warn("rules of a quarantine of this process alone are dropped: it shares a list now", "rules", len(all), "help", "add to that list what is still needed")
		}
		return 0
	}
	now := time.Now()
	for _, s := range all {
		if !s.Until.After(now) {
			continue
		}
		rule, err := dlq.ParseRule(string(s.Rule))
		if err == nil {
			until := s.Until
			if most := now.Add(dlq.MaxQuarantineFor); until.After(most) {
				until = most // the wall clock was put back
			}
			err = g.ownRules.Add(dlq.QuarantineEntry{Rule: rule, By: s.By, Why: s.Why, At: s.At, Until: until})
		}
		if err != nil {
			g.log.Warn("a rule of the quarantine is not taken up", "rule", string(s.Rule), "error", err, "help", "add it again")
			continue
		}
		taken++
	}
	if taken > 0 {
		g.log.Warn("messages are in quarantine since before the restart", "rules", taken, "help", "look at the list, and take off what is over")
	}
	return taken
}

// savedRules are the rules in force of the Guard's own list; none if the list may be shared.
func (g *Guard) savedRules() (all []savedRule) {
	if g.ownRules == nil {
		return nil
	}
	for _, e := range g.ownRules.Entries() {
		all = append(all, savedRule{[]byte(e.Rule.String()), e.By, e.Why, e.At, e.Until})
	}
	return all
}

func scopeKey(path []string) string { return strings.Join(path, "\x00") }

// goneScope tells whether the saved state of a breaker that no source has claimed is too
// old. It is not while an operator's force lasts.
func goneScope(now time.Duration, sc circuit.SavedScope) bool {
	return now-sc.At >= keepFor && !(sc.Forced && now < sc.Until)
}

// restore gives a new breaker the state that it had in the previous process.
func (g *Guard) restore(now time.Duration, leaf *circuit.Leaf, path []string) {
	g.mu.Lock()
	sc, ok := g.restored[scopeKey(path)]
	g.mu.Unlock()
	if !ok {
		return
	}
	taken := leaf.Restore(now, sc.Saved, now-sc.At > stateFresh)
	g.mu.Lock()
	delete(g.restored, scopeKey(path)) // the breaker has it now
	g.mu.Unlock()
	if taken && !leaf.Closed() {
		b := leaf.Snapshot(now)
		args := []any{"scope", leaf.Name(), "state", b.State.String(), "cause", string(b.Cause)}
		level := slog.LevelInfo
		if b.Forced {
			level = slog.LevelWarn
			if b.Until != never {
				args = append(args, "for", (b.Until - now).Round(time.Second))
			}
			args = append(args, "help", "release it")
		}
		g.log.Log(context.Background(), level, "a breaker begins as the process before left it", args...)
	}
}

// sayPaused logs that a source is paused since before the restart.
func (g *Guard) sayPaused(name string, k carryOver) {
	now := g.now()
	if !k.restart || !k.paused || now >= k.pauseEnds {
		return
	}
	args := []any{"source", name, "reason", causeOperator, "help", "resume it"}
	if k.pauseEnds != never {
		args = append(args, "for", (k.pauseEnds - now).Round(time.Second))
	}
	g.log.Warn("a source is paused since before the restart", args...)
}

// collect returns the state to write: of open sources and of ended ones. A source that is
// opened meanwhile could be in neither part, so collect then starts again, up to maxLooks
// times.
func (w *saver) collect(now time.Duration) savedParts {
	g := w.g
	for try := 0; ; try++ {
		open := g.sorted.Load()
		parts := savedParts{Group: g.cfg.Group, Scopes: g.scopes.Save(now, nil), Sources: make(map[string]savedSource)}
		failures := maxSavedFailures
		for _, s := range *open {
			if saved, ok := s.saved(now, failures); ok {
				failures -= len(saved.Failed)
				parts.Sources[s.Name()] = saved
			}
		}
		g.mu.Lock()
		for _, sc := range g.restored {
			parts.Scopes = append(parts.Scopes, sc)
		}
		for _, name := range slices.Sorted(maps.Keys(g.kept)) {
			k := g.kept[name]
			saved, ok := k.saved()
			if !ok {
				continue
			}
			saved.At = k.at
			if len(saved.Failed) > failures {
				saved.Failed = nil
			}
			failures -= len(saved.Failed)
			parts.Sources[name] = saved
		}
		g.mu.Unlock()
		if g.sorted.Load() == open || try == maxLooks {
			slices.SortFunc(parts.Scopes, func(a, b circuit.SavedScope) int { return slices.Compare(a.Path, b.Path) })
			return parts
		}
	}
}

// note says that something may have changed. The sweeper calls it while messages move.
func (w *saver) note() {
	if w != nil {
		token(w.moved)
	}
}

// hurry says that something has changed that must not be lost.
func (w *saver) hurry() {
	if w != nil {
		token(w.spent)
	}
}

func (w *saver) run(ctx context.Context) {
	defer close(w.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	wait := func(d time.Duration, unless <-chan struct{}) {
		timer.Reset(d)
		select {
		case <-timer.C:
		case <-unless:
			token(w.moved)
		case <-ctx.Done():
		}
	}
	for {
		select {
		case <-w.moved:
		case <-w.spent:
		case <-ctx.Done():
			return
		}
		w.save()
		wait(saveSoon, nil)
		wait(saveEvery-saveSoon, w.spent)
	}
}

// save writes the state if it has changed. An error is logged once, until a write
// succeeds.
func (w *saver) save() {
	w.mu.Lock()
	if w.file == nil {
		w.mu.Unlock()
		return
	}
	err, was := w.saveLocked(w.g.now()), w.failing
	w.failing = err != nil
	w.mu.Unlock()
	switch {
	case err != nil && !was:
		w.g.log.Warn("the state cannot be written: a restart would begin with an older one", "dir", w.dir, "error", err, "help", "it is tried again each second while messages move")
	case err == nil && was:
		w.g.ends.Info("the state is written again", "dir", w.dir)
	}
}

func (w *saver) saveLocked(now time.Duration) error {
	parts := w.collect(now)
	parts.Rules = w.g.savedRules()
	state, err := json.Marshal(parts)
	if err != nil {
		return err
	}
	rests := len(parts.Scopes)+len(parts.Sources)+len(parts.Rules) == 0
	if bytes.Equal(state, w.last) && (rests || now-w.written < saveAnew) {
		return nil
	}
	body, err := json.Marshal(savedState{now, state})
	if err != nil {
		return err
	}
	if err := w.file.Write(body); err != nil {
		return err
	}
	w.last, w.written = state, now
	return nil
}

// dropState closes the file without a write, so that the directory stays as it was.
func (g *Guard) dropState() error {
	if g.saver == nil {
		return nil
	}
	return g.saver.file.Close()
}

// closeState writes once more, and closes the file.
func (g *Guard) closeState() error {
	if g.saver == nil {
		return nil
	}
	<-g.saver.done
	g.saver.save()
	g.saver.mu.Lock()
	defer g.saver.mu.Unlock()
	if g.saver.file == nil {
		return nil
	}
	var err error
	if g.saver.failing {
		err = errors.New("the last state is not written")
	}
	err = errors.Join(err, g.saver.file.Close())
	g.saver.file = nil
	if err != nil {
		return fmt.Errorf("guard: Config.StateDir: %w", err)
	}
	return nil
}

// saved is the state of an open source that a restart needs, with up to most failed
// messages; false if there is none.
func (s *Source[M]) saved(now time.Duration, most int) (savedSource, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left {
		return savedSource{}, false
	}
	k := s.keepLocked(now)
	k.suspects = nil
	saved, ok := k.saved()
	saved.Failed = s.c.failedMessages(most)
	return saved, ok || len(saved.Failed) > 0
}

// failedMessages describes up to most unsettled messages that have failed, here or in an
// earlier epoch. Those that are here have At 0, which means now.
func (c *machine[M]) failedMessages(most int) map[string]savedFailure {
	most = min(most, maxSuspects)
	var all map[string]savedFailure
	add := func(name string, s suspect) {
		if all == nil {
			all = make(map[string]savedFailure)
		}
		if _, ok := all[name]; ok || len(all) < most {
			all[name] = s.saved()
		}
	}
	look := func(it *item[M]) {
		if s, ok := it.suspect(0); ok {
			add(it.name, s)
		}
	}
	c.items(look)
	for it := range c.writing {
		look(it)
	}
	for _, name := range slices.Sorted(maps.Keys(c.suspects)) {
		add(name, c.suspects[name])
	}
	return all
}

// saved is the state of a function that a restart needs: its pause.
func (f *Func[M]) saved(now time.Duration, _ int) (savedSource, bool) {
	ends := f.pausedUntil(now)
	return savedSource{Paused: true, PauseEnds: ends}, ends != 0
}

// saved is the written form of k, without At; false if there is nothing to write.
func (k carryOver) saved() (savedSource, bool) {
	s := savedSource{Guesses: k.guesses, Paused: k.paused, Storm: k.storm}
	if k.budget != nil {
		if b, ok := k.budget.Save(); ok {
			s.Budget, s.BudgetOf = &b, savedBudgetConfig(k.cfg)
		}
	}
	if k.guesses > 0 {
		s.GuessedAt = k.guessedAt
	}
	if k.paused {
		s.PauseEnds = k.pauseEnds
	}
	if k.asked > 0 {
		s.Asked, s.AskedFor = k.asked, cutText(k.askedText)
	}
	for name, f := range k.suspects {
		if s.Failed == nil {
			s.Failed = make(map[string]savedFailure)
		}
		s.Failed[name] = f.saved()
	}
	if f := k.flaky; f.recovered > 0 {
		s.Flaky = savedFlakiness{f.recovered, f.all, f.relapses, f.at}
	}
	return s, s.Budget != nil || k.guesses > 0 || k.paused || k.asked > 0 || k.storm != nil || len(s.Failed) > 0
}

// anyRate is a storm rate that every budget fits. The budget was checked with the rate of
// its own source when it was made, and the source that takes it over checks it again.
const anyRate = 1e-9

// kept is s in the Guard that reads it at now. An invalid budget is left out.
func (s savedSource) kept(now time.Duration) carryOver {
	k := carryOver{
		guesses: s.Guesses, guessedAt: s.GuessedAt, paused: s.Paused, pauseEnds: s.PauseEnds, asked: s.Asked,
		storm: s.Storm, at: s.At, restart: true,
		flaky: flakiness{recovered: max(0, s.Flaky.Recovered), all: max(0, s.Flaky.All), relapses: max(0, s.Flaky.Relapses), at: s.Flaky.At},
	}
	if s.Budget != nil {
		cfg := dlq.BudgetConfig(s.BudgetOf)
		if b, err := credit.New(cfg, anyRate); err == nil {
			b.Restore(now, *s.Budget)
			k.budget, k.cfg = b, cfg
		}
	}
	if s.AskedFor != "" {
		k.askedFor, k.askedText = errors.New(s.AskedFor), s.AskedFor
	}
	for name, f := range s.Failed {
		if k.suspects == nil {
			k.suspects = make(map[string]suspect)
		}
		k.suspects[name] = f.suspect()
	}
	return k
}

func (s suspect) saved() savedFailure {
	f := savedFailure{
		Tries: s.tries, Attempts: s.attempts, After: s.after, AfterAt: s.afterAt, LastWord: s.lastWord, WordAt: s.wordAt,
		FirstFailed: s.firstFailed, At: s.at, Parked: s.parked,
	}
	for i, a := range s.failures {
		if i == 0 || i == len(s.failures)-1 {
			f.Failures = append(f.Failures, savedAttempt{a.n, a.at, cutText(a.words.Type), cutText(a.words.Message)})
		}
	}
	return f
}

func (f savedFailure) suspect() suspect {
	s := suspect{
		tries: f.Tries, attempts: f.Attempts, after: f.After, afterAt: f.AfterAt, lastWord: f.LastWord, wordAt: f.WordAt,
		firstFailed: f.FirstFailed, at: f.At, parked: f.Parked,
	}
	for _, a := range f.Failures {
		s.failures = append(s.failures, attempt{n: a.N, at: a.At, words: dlq.ErrorInfo{Type: a.Type, Message: a.Message}})
	}
	return s
}

func cutText(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxSavedText)], "") }
