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
	// MaxKey is the longest key of an effect, in bytes. Hash a longer key.
	MaxKey = 512

	// MaxResult is the longest kept result of an effect, in bytes.
	MaxResult = 16 << 10

	// markTime is how long the store may take to write the mark after the effect has
	// happened, even if the delivery's context has ended.
	markTime = 10 * time.Second

	// maxRefused is the number of marks that the store may refuse while it accepts others.
	// Above it, no new effect begins.
	maxRefused = 16
)

// Kinds of keys: the first byte of each key in the store.
const (
	kindEffect = 'k'
	kindEntity = 'e'
	kindStep   = 's'
	kindTrial  = 't'
)

// InDoubt says what to do about an effect in doubt: it began, and nobody knows whether it
// happened.
type InDoubt uint8

const (
	// RunAgain runs the effect again: at least once. The local store then does not record
	// that an effect begins, which saves half of its cost.
	RunAgain InDoubt = iota

	// Refuse returns [ErrInDoubt] until a person calls [Runner.Settle]: at most once.
	Refuse
)

// Config holds the settings of a [Runner]. The zero value is valid.
type Config struct {
	// InDoubt is RunAgain (the default) or Refuse. [WithLookup] takes precedence.
	InDoubt InDoubt
}

// An Option gives a Runner a logger or a lookup.
type Option func(*Runner)

// WithLogger logs effects in doubt, and marks that could not be written: both need a
// person's attention. Without a logger the runner is silent.
func WithLogger(log *slog.Logger) Option {
	return func(r *Runner) {
		if log != nil {
			r.log = log
		}
	}
}

// WithLookup makes the runner call happened about an effect in doubt before it would run
// again. happened asks the dependency by the key, as payment providers and most databases
// allow. So the effect happens exactly once, although it is outside the store. If happened
// returns an error, the effect stays in doubt and Do returns the error.
//
// The answer must be final: an earlier attempt that is still on its way to the dependency
// must not take effect after it.
func WithLookup(happened func(ctx context.Context, key string) (bool, error)) Option {
	return func(r *Runner) { r.lookup = happened }
}

// Runner runs effects once. It is safe for concurrent use, and has no goroutine of its own.
type Runner struct {
	store  Store
	log    *slog.Logger
	doubt  InDoubt
	lookup func(context.Context, string) (bool, error)

	// unmarked are effects that have happened, but whose marks the store did not accept. No
	// effect begins before their marks are written, except for refused marks. So their
	// number is at most maxRefused, and the effects that ran at the same time.
	mu       sync.Mutex
	unmarked []*unmarked   // guarded by mu
	turn     chan struct{} // held while the marks are written; taken before mu
}

type unmarked struct {
	name  string // the key of the claim, in the store
	key   string // the caller's key
	claim Claim
	value []byte
	also  []Entry

	// refused means that the store accepted another mark after it had refused this one.
	// Then only effects of the same name wait for this mark. It is guarded by Runner.mu,
	// and written only with the turn held.
	refused bool
	tried   time.Time // when Finish was last tried for the mark; guarded by Runner.mu
}

// New makes a Runner over a store. It does not call the store.
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

// CheckKey returns an [ErrKey] for a key that is empty or longer than [MaxKey].
func CheckKey(key string) error {
	if len(key) < 1 || len(key) > MaxKey {
		return fmt.Errorf("%w: %d bytes: it must be 1 to %d", ErrKey, len(key), MaxKey)
	}
	return nil
}

// Do runs effect, unless the effect of this key has already happened. It returns nil when
// the effect has happened and its mark is on the store's disk. The key names the effect, so
// two effects of one message have two keys: "charge/17" and "mail/17".
//
// A second Do of a key waits for the end of the first, in this process and in all that
// share the store. If its context ends first, it returns an [*UnderwayError].
//
// An effect that returns an error or panics leaves no mark, and the next Do runs it again.
// So an effect should either succeed, or fail before it has changed anything. If it does
// not know, it returns an error that wraps [ErrInDoubt].
//
// If the store fails before the effect, the effect does not run. If it fails afterwards, Do
// returns [ErrUnmarked]; the effect is not repeated while this process lives.
func (r *Runner) Do(ctx context.Context, key string, effect func(ctx context.Context) error) error {
	_, err := r.Result(ctx, key, func(ctx context.Context) ([]byte, error) { return nil, effect(ctx) })
	return err
}

// Result is Do for an effect with a result, such as the number of a booking. The result is
// kept with the mark, and a duplicate gets the same one. It may have up to [MaxResult]
// bytes.
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
	if found.Done { // the effect is marked, and a later Settle of the key did not finish
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

// A kept result begins with resultKept. resultLarge stands for a result that was too large.
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

// records reports whether the store must record that an effect began.
func (r *Runner) records() bool { return r.doubt == Refuse || r.lookup != nil }

// named replaces the store's key in an error by the caller's.
func named(err error, key string) error {
	if u, ok := errors.AsType[*UnderwayError](err); ok {
		return &UnderwayError{Key: key, Wait: u.Wait, Err: u.Err}
	}
	return fmt.Errorf("once: %.80q: %w", key, err)
}

// decide reports whether an effect in doubt has happened. If the lookup panics or calls
// Goexit, the effect stays in doubt and the claim ends.
func (r *Runner) decide(ctx context.Context, key string, claim Claim) (happened bool, err error) {
	switch {
	case r.lookup != nil:
		returned := false
		defer func() {
			if !returned {
				_ = r.leave(ctx, claim) // the caller gets the panic
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

// perform runs an effect and ends the claim of u, even if the effect panics or calls
// Goexit. doubt says that the effect was in doubt before; it stays in doubt if it does not
// begin.
func (r *Runner) perform(ctx context.Context, u *unmarked, doubt bool, effect func(context.Context) ([]byte, []Entry, error)) error {
	claim := u.claim
	if claim.Context().Err() != nil { // the claim was lost, or the delivery has ended
		err := context.Cause(claim.Context())
		if doubt {
			return also(err, r.leave(ctx, claim))
		}
		return also(err, r.release(ctx, claim))
	}
	returned := false
	defer func() {
		if !returned {
			_ = r.release(ctx, claim) // the caller gets the panic
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

// also returns err unchanged, or joined with the store's error if there is one.
func also(err, stores error) error {
	if stores == nil {
		return err
	}
	return errors.Join(err, stores)
}

// after returns a context for the work after an effect. It does not end with ctx, but after
// markTime.
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

// writeUnmarked writes the marks that the store did not accept before. If one fails again,
// the effect of name must not begin: the store may accept no mark at all. If the store
// refuses a mark but accepts another one, the refused mark only stops effects of its own
// name. A caller that waits for the turn gives up when its context ends.
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
	takes := false // the store has accepted a mark
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

// due returns the marks that must be written before an effect of name may begin. A refused
// mark of another name is included again after each markTime.
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

// refusable reports whether one more mark may be refused without stopping all effects.
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

// tryMark writes a mark. It forgets the mark if it is written, or if another process has
// its key. The caller holds the turn.
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

// takesAnother reports whether the store accepts the mark of a new random key. The store
// later forgets this mark like any other.
func (r *Runner) takesAnother(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, markTime)
	defer cancel()
	claim, _, err := r.store.Claim(ctx, string(kindTrial)+rand.Text(), Ask{})
	if err != nil {
		return false
	}
	if err := claim.Finish(ctx, nil); err != nil {
		_ = r.release(ctx, claim) // the caller returns the store's error
		return false
	}
	return true
}

// Settle ends the doubt about an effect, after a person has checked whether it happened. If
// it did not, the next Do runs it. Settle also accepts a key that is not in doubt: with
// happened, its effect will not run. A marked effect keeps its mark and its result. Like
// Do, Settle waits for a process that runs the effect.
func (r *Runner) Settle(ctx context.Context, key string, happened bool) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	name := string(kindEffect) + key
	if err := r.writeUnmarked(ctx, name); err != nil { // the key's claim may be held for one of these marks
		return err
	}
	claim, found, err := r.store.Claim(ctx, name, Ask{Over: true, Record: true})
	if err != nil {
		return named(err, key)
	}
	if happened && !found.Done {
		return r.finish(ctx, &unmarked{name: name, key: key, claim: claim})
	}
	return r.release(ctx, claim) // a marked effect keeps its result
}

// Doubtful returns the keys whose effects are in doubt, and those of effects under way. It
// reads the whole store.
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
