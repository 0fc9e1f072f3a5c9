// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
)

const (
	// MaxKey is the longest key of an effect, in bytes. Hash what is longer.
	MaxKey = 512

	// MaxResult is the longest result of an effect that is kept, in bytes.
	MaxResult = 16 << 10

	// markTime is how long the store may take for a mark when the effect has happened,
	// whatever became of the delivery's context.
	markTime = 10 * time.Second

	// maxRefused is how many marks the store may refuse, while it takes others, before no
	// effect begins any more.
	maxRefused = 16
)

// Kinds of keys: the first byte that a store sees.
const (
	kindEffect = 'k'
	kindEntity = 'e'
	kindStep   = 's'
	kindTrial  = 't'
)

// InDoubt says what becomes of an effect that began, when nobody knows whether it happened.
type InDoubt uint8

const (
	// RunAgain runs the effect again: at least once. The local store then does not write
	// down that an effect begins, which is half of its cost.
	RunAgain InDoubt = iota

	// Refuse returns [ErrInDoubt] until a person has called [Runner.Settle]: at most once.
	Refuse
)

// Config is how a [Runner] decides. The zero value is valid.
type Config struct {
	// InDoubt is RunAgain or Refuse; unset means RunAgain. [WithLookup] comes first.
	InDoubt InDoubt
}

// An Option supplies a collaborator.
type Option func(*Runner)

// WithLogger logs what needs a person's attention: effects in doubt, and marks that could
// not be written. It is silent without.
func WithLogger(log *slog.Logger) Option {
	return func(r *Runner) {
		if log != nil {
			r.log = log
		}
	}
}

// WithLookup asks happened about an effect in doubt, before it would run again: at the
// dependency itself, by the key, as payment providers and most databases allow. Then the
// effect happens exactly once although it is outside of the store. An error of happened
// leaves the effect in doubt, and is returned by Do.
//
// The dependency must answer for the end of the last attempt: one that may still be on its
// way there must not happen later.
func WithLookup(happened func(ctx context.Context, key string) (bool, error)) Option {
	return func(r *Runner) { r.lookup = happened }
}

// Runner runs effects once. It is safe for concurrent use, and has no goroutine of its own.
type Runner struct {
	store  Store
	log    *slog.Logger
	doubt  InDoubt
	lookup func(context.Context, string) (bool, error)

	// unmarked are the effects that have happened and whose marks the store did not take.
	// No effect begins before they are written, except for those that are refused. So there
	// are never more of them than maxRefused and the effects that ran at the same time.
	mu       sync.Mutex
	unmarked []*unmarked   // guarded by mu
	turn     chan struct{} // held by whoever writes them; taken before mu
}

type unmarked struct {
	name  string // the claim's, in the store
	key   string // the caller's
	claim Claim
	value []byte
	also  []Entry

	// refused means that the store took another mark after it had not taken this one:
	// only effects of the same name wait for it. It is guarded by Runner.mu, and written
	// with the turn.
	refused bool
	tried   time.Time // when the mark was last tried; guarded by Runner.mu
}

// New makes a Runner over a store. It asks the store nothing.
func New(store Store, cfg Config, opts ...Option) (*Runner, error) {
	var errs []error
	if store == nil {
		errs = append(errs, errors.New("once: a store is needed"))
	}
	if cfg.InDoubt > Refuse {
		errs = append(errs, fmt.Errorf("once: Config.InDoubt: %d is not RunAgain (0) or Refuse (1)", cfg.InDoubt))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	r := &Runner{store: store, doubt: cfg.InDoubt, log: slog.New(slog.DiscardHandler), turn: make(chan struct{}, 1)}
	for _, o := range opts {
		o(r)
	}
	return r, nil
}

// CheckKey refuses a key that is empty or longer than [MaxKey]: [ErrKey].
func CheckKey(key string) error {
	if len(key) < 1 || len(key) > MaxKey {
		return fmt.Errorf("%w: %d bytes: it must be 1 to %d", ErrKey, len(key), MaxKey)
	}
	return nil
}

// Do runs effect unless the effect of this key has happened, and returns nil when it has and
// its mark is on the store's disk. The key names the effect, so two effects of one message
// have two keys: "charge/17" and "mail/17".
//
// A second Do of a key waits for the end of the first, in this process and in others that
// share the store; when its context ends before, it returns an [*UnderwayError].
//
// An effect that returns an error or panics leaves no mark, and runs again at the next Do:
// it should return nil or fail before it has changed anything. If it cannot know, it returns
// an error that wraps [ErrInDoubt].
//
// If the store fails before the effect, the effect does not run. If it fails after it, Do
// returns [ErrUnmarked]; while this process lives, the effect is not repeated.
func (r *Runner) Do(ctx context.Context, key string, effect func(ctx context.Context) error) error {
	_, err := r.Result(ctx, key, func(ctx context.Context) ([]byte, error) { return nil, effect(ctx) })
	return err
}

// Result is Do for an effect with a result, such as the number of a booking: it is kept with
// the mark, and a duplicate gets the same. It may have up to [MaxResult] bytes.
func (r *Runner) Result(ctx context.Context, key string, effect func(ctx context.Context) ([]byte, error)) ([]byte, error) {
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	name := string(kindEffect) + key
	claim, found, err := r.begin(ctx, name, key, Ask{})
	if err != nil {
		return nil, err
	}
	if claim == nil {
		return result(key, found.Value)
	}
	if found.Done { // and a Settle over the mark did not end
		if err := r.release(ctx, claim); err != nil {
			return nil, named(err, key)
		}
		return result(key, found.Value)
	}
	if found.Doubt {
		happened, err := r.decide(ctx, key, claim)
		if err != nil {
			return nil, also(err, r.leave(ctx, claim))
		}
		if happened {
			return nil, r.finish(ctx, &unmarked{name: name, key: key, claim: claim})
		}
	}
	var value []byte
	err = r.perform(ctx, &unmarked{name: name, key: key, claim: claim}, found.Doubt && r.records(), func(ctx context.Context) ([]byte, []Entry, error) {
		out, err := effect(ctx)
		if err != nil {
			return nil, nil, err
		}
		value = keepResult(out)
		return value, nil, nil
	})
	if err != nil {
		return nil, err
	}
	return result(key, value)
}

// A kept result begins with a byte that tells it from one that was too large.
const (
	resultKept  = 0
	resultLarge = 1
)

func keepResult(out []byte) []byte {
	switch {
	case len(out) == 0:
		return nil
	case len(out) > MaxResult:
		return []byte{resultLarge}
	default:
		return append([]byte{resultKept}, out...)
	}
}

func result(key string, value []byte) ([]byte, error) {
	switch {
	case len(value) == 0:
		return nil, nil
	case value[0] == resultLarge:
		return nil, fmt.Errorf("%w: %.80q: it must be %d bytes at most", ErrResult, key, MaxResult)
	default:
		return slices.Clone(value[1:]), nil
	}
}

// begin claims a name. The claim is nil if its effect has happened.
func (r *Runner) begin(ctx context.Context, name, key string, ask Ask) (Claim, Found, error) {
	if err := ctx.Err(); err != nil {
		return nil, Found{}, err
	}
	if err := r.writeUnmarked(ctx, name); err != nil {
		return nil, Found{}, err
	}
	ask.Record = r.records()
	claim, found, err := r.store.Claim(ctx, name, ask)
	if err != nil {
		return nil, Found{}, named(err, key)
	}
	return claim, found, nil
}

// records tells whether it matters that an effect began.
func (r *Runner) records() bool { return r.doubt == Refuse || r.lookup != nil }

// named puts the caller's key where the store has its own.
func named(err error, key string) error {
	if u, ok := errors.AsType[*UnderwayError](err); ok {
		return &UnderwayError{Key: key, Wait: u.Wait, Err: u.Err}
	}
	return fmt.Errorf("once: %.80q: %w", key, err)
}

// decide says of an effect in doubt whether it has happened. A lookup that panics or calls
// Goexit leaves the doubt, and not the claim.
func (r *Runner) decide(ctx context.Context, key string, claim Claim) (happened bool, err error) {
	switch {
	case r.lookup != nil:
		returned := false
		defer func() {
			if !returned {
				_ = r.leave(ctx, claim) // the panic is what the caller hears of
			}
		}()
		happened, err = r.lookup(claim.Context(), key)
		returned = true
		if err != nil {
			return false, fmt.Errorf("%w: %.80q: lookup: %w", ErrInDoubt, key, err)
		}
		r.log.LogAttrs(ctx, slog.LevelInfo, "once: effect was in doubt, looked up", slog.String("key", key), slog.Bool("happened", happened))
		return happened, nil
	case r.doubt == Refuse:
		r.log.LogAttrs(ctx, slog.LevelWarn, "once: effect in doubt, waits for Settle", slog.String("key", key))
		return false, fmt.Errorf("%w: %.80q: it waits for Settle", ErrInDoubt, key)
	default:
		r.log.LogAttrs(ctx, slog.LevelWarn, "once: effect in doubt, runs again", slog.String("key", key))
		return false, nil
	}
}

// perform runs an effect and ends the claim of u, also if the effect panics or calls Goexit.
// doubt says that it was in doubt: if it does not begin it stays so.
func (r *Runner) perform(ctx context.Context, u *unmarked, doubt bool, effect func(context.Context) ([]byte, []Entry, error)) error {
	claim := u.claim
	if claim.Context().Err() != nil { // the claim was lost, or the delivery has ended: the effect does not begin
		err := context.Cause(claim.Context())
		if doubt {
			return also(err, r.leave(ctx, claim))
		}
		return also(err, r.release(ctx, claim))
	}
	returned := false
	defer func() {
		if !returned {
			_ = r.release(ctx, claim) // the panic is what the caller hears of
		}
	}()
	value, others, err := effect(claim.Context())
	returned = true
	if err != nil {
		if errors.Is(err, ErrInDoubt) && r.records() {
			return also(err, r.leave(ctx, claim))
		}
		return also(err, r.release(ctx, claim))
	}
	u.value, u.also = value, others
	return r.finish(ctx, u)
}

// also is an effect's error as it is, unless the store has one, too.
func also(err, stores error) error {
	if stores == nil {
		return err
	}
	return errors.Join(err, stores)
}

// after is a context for what an effect leaves to be done, whatever became of its own.
func after(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), markTime)
}

func (r *Runner) release(ctx context.Context, c Claim) error {
	ctx, cancel := after(ctx)
	defer cancel()
	return c.Release(ctx)
}

func (r *Runner) leave(ctx context.Context, c Claim) error {
	ctx, cancel := after(ctx)
	defer cancel()
	return c.Leave(ctx)
}

// finish writes the mark of an effect that has happened, or keeps it for later.
func (r *Runner) finish(ctx context.Context, u *unmarked) error {
	ctx, cancel := after(ctx)
	defer cancel()
	err := u.claim.Finish(ctx, u.value, u.also...)
	if err == nil {
		return nil
	}
	r.log.LogAttrs(ctx, slog.LevelWarn, "once: effect happened, its mark is not written", slog.String("key", u.key), slog.Any("error", err))
	if !errors.Is(err, ErrLost) {
		r.mu.Lock()
		r.unmarked = append(r.unmarked, u)
		r.mu.Unlock()
	}
	return fmt.Errorf("%w: %.80q: %w", ErrUnmarked, u.key, err)
}

// writeUnmarked writes the marks that the store did not take before. If it does not take one
// now, the effect of name must not begin: the store may take no mark at all. A mark that the
// store refuses while it takes another stops only the effects of its own name. Whoever waits
// for another one to write them gives up with its context.
func (r *Runner) writeUnmarked(ctx context.Context, name string) error {
	if len(r.due(name)) == 0 {
		return nil
	}
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	takes := false // the store has taken a mark
	for _, u := range r.due(name) {
		written, err := r.tryMark(ctx, u)
		if err == nil {
			takes = takes || written
			continue
		}
		if ctx.Err() == nil && !u.refused && r.refusable() && (takes || r.takesAnother(ctx)) {
			takes = true
			r.mu.Lock()
			u.refused = true
			r.mu.Unlock()
			r.log.LogAttrs(ctx, slog.LevelWarn, "once: the store refuses a mark and takes others, effects of other keys go on", slog.String("key", u.key), slog.Any("error", err))
		}
		if !u.refused || u.name == name {
			return fmt.Errorf("once: the mark of %.80q is not written yet: %w", u.key, err)
		}
	}
	return nil
}

// due are the marks to be written before an effect of name may begin. Refused marks of other
// names are among them each markTime.
func (r *Runner) due(name string) (due []*unmarked) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.unmarked {
		if !u.refused || u.name == name || time.Since(u.tried) >= markTime {
			due = append(due, u)
		}
	}
	return due
}

// refusable tells whether one more mark may be refused without stopping all effects.
func (r *Runner) refusable() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, u := range r.unmarked {
		if u.refused {
			n++
		}
	}
	return n < maxRefused
}

// tryMark writes a mark, and forgets it if it is written or another process has its key. The
// caller has the turn.
func (r *Runner) tryMark(ctx context.Context, u *unmarked) (written bool, err error) {
	r.mu.Lock()
	u.tried = time.Now()
	r.mu.Unlock()
	try, cancel := context.WithTimeout(ctx, markTime)
	defer cancel()
	err = u.claim.Finish(try, u.value, u.also...)
	if err != nil && !errors.Is(err, ErrLost) {
		return false, err
	}
	if err != nil {
		r.log.LogAttrs(ctx, slog.LevelWarn, "once: effect happened, and another process has taken its key", slog.String("key", u.key), slog.Any("error", err))
	}
	r.mu.Lock()
	r.unmarked = slices.DeleteFunc(r.unmarked, func(other *unmarked) bool { return other == u })
	r.mu.Unlock()
	return err == nil, nil
}

// takesAnother tells whether the store takes the mark of a key that nobody else has. The mark
// is forgotten as others are.
func (r *Runner) takesAnother(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, markTime)
	defer cancel()
	claim, _, err := r.store.Claim(ctx, string(kindTrial)+rand.Text(), Ask{})
	if err != nil {
		return false
	}
	if err := claim.Finish(ctx, nil); err != nil {
		_ = r.release(ctx, claim) // the store fails, which the caller hears of
		return false
	}
	return true
}

// Settle ends the doubt about an effect, after a person has looked whether it happened. If
// not, it runs at the next Do. A key that is not in doubt is settled as well: with happened,
// its effect will not run. An effect that has its mark keeps it, and its result. Settle waits
// for a process that runs the effect, as Do does.
func (r *Runner) Settle(ctx context.Context, key string, happened bool) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	name := string(kindEffect) + key
	if err := r.writeUnmarked(ctx, name); err != nil { // the key may be one of these, and its claim ours
		return err
	}
	claim, found, err := r.store.Claim(ctx, name, Ask{Over: true, Record: true})
	if err != nil {
		return named(err, key)
	}
	if happened && !found.Done {
		return r.finish(ctx, &unmarked{name: name, key: key, claim: claim})
	}
	return r.release(ctx, claim) // which keeps the result of one that has happened
}

// Doubtful lists the keys whose effects are in doubt, and those under way. It reads all
// that the store has.
func (r *Runner) Doubtful(ctx context.Context) ([]string, error) {
	var keys []string
	for e, err := range r.store.List(ctx, kindEffect) {
		if err != nil {
			return keys, err
		}
		if e.Doubt || e.Damaged != nil {
			keys = append(keys, e.Key[1:])
		}
	}
	return keys, nil
}
