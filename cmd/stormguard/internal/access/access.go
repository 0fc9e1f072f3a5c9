// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package access holds the CLI's settings for the access to a broker: TLS, and a
// user with a password.
package access

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/IBM/sarama"
	"github.com/nats-io/nats.go"
)

// A Mechanism is a SASL mechanism: how a Kafka client proves its password.
type Mechanism string

// The mechanisms. Plain sends the password itself. With the others both sides prove
// that they know the password.
const (
	Plain       Mechanism = "plain"
	ScramSHA256 Mechanism = "scram-sha-256"
	ScramSHA512 Mechanism = "scram-sha-512"
)

// Mechanisms returns all mechanisms.
func Mechanisms() []Mechanism { return []Mechanism{Plain, ScramSHA256, ScramSHA512} }

// Config holds the values of the flags. The zero value means plain text and no user.
type Config struct {
	TLS       bool   // --tls; CA, Cert and Key turn TLS on, too
	CA        string // --ca: a PEM file with the certificates to trust; unset: the system's
	Cert, Key string // --cert, --key: PEM files with the client's own certificate and key

	SASL         Mechanism // --sasl: only for Kafka
	User         string    // --user
	PasswordFile string    // --password-file

	// Prefix is the first part of the flags' names, such as "register-". Errors use it.
	Prefix string
}

// flags inserts the prefix into the names of flags in a text.
func (c Config) flags(text string) string { return strings.ReplaceAll(text, "--", "--"+c.Prefix) }

// Any tells whether anything is set.
func (c Config) Any() bool { return c != Config{} }

// WantsTLS tells whether any flag asks for TLS.
func (c Config) WantsTLS() bool { return c.TLS || c.CA != "" || c.Cert != "" || c.Key != "" }

// Validate reports all wrong combinations of flags, and names the flags. kafka says
// that the broker is Kafka: only Kafka has mechanisms.
func (c Config) Validate(kafka bool) error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(c.flags(format), args...)) }
	if (c.Cert == "") != (c.Key == "") {
		add("--cert and --key: must be given together")
	}
	if (c.User == "") != (c.PasswordFile == "") {
		add("--user and --password-file: must be given together")
	}
	switch {
	case kafka && c.User != "" && c.SASL == "":
		add("--sasl: must be given with --user: plain, scram-sha-256 or scram-sha-512")
	case kafka && c.SASL != "" && c.User == "":
		add("--sasl %q: needs --user and --password-file", c.SASL)
	case !kafka && c.SASL != "":
		add("--sasl %q: is for Kafka", c.SASL)
	}
	return errors.Join(errs...)
}

// A FlagError names the flags whose files cannot be used.
type FlagError struct{ error }

func (e FlagError) Unwrap() error { return e.error }

// Open reads the files. Its error is a [FlagError].
func (c Config) Open() (*Access, error) {
	a := &Access{user: c.User, mechanism: c.SASL}
	var errs []error
	if c.PasswordFile != "" {
		text, err := os.ReadFile(c.PasswordFile)
		if err != nil {
			errs = append(errs, fmt.Errorf(c.flags("--password-file: %w"), err))
		}
		a.password = strings.TrimRight(string(text), "\r\n")
	}
	if c.WantsTLS() {
		a.tls = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if c.CA != "" {
		a.tls.RootCAs = x509.NewCertPool()
		switch pem, err := os.ReadFile(c.CA); {
		case err != nil:
			errs = append(errs, fmt.Errorf(c.flags("--ca: %w"), err))
		case !a.tls.RootCAs.AppendCertsFromPEM(pem):
			errs = append(errs, fmt.Errorf(c.flags("--ca %q: no certificate in it; it must be PEM"), c.CA))
		}
	}
	if c.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			errs = append(errs, fmt.Errorf(c.flags("--cert %q, --key %q: %w"), c.Cert, c.Key, err))
		}
		a.tls.Certificates = []tls.Certificate{pair}
	}
	if len(errs) > 0 {
		return nil, FlagError{errors.Join(errs...)}
	}
	return a, nil
}

// Access holds a [Config]'s user and mechanism, and the contents of its files. It does not
// change after [Config.Open].
type Access struct {
	tls            *tls.Config // nil: plain text, or the system's certificates if a URL asks for TLS
	user, password string
	mechanism      Mechanism
}

// TLS returns a copy of the client's TLS configuration, or nil.
func (a *Access) TLS() *tls.Config { return a.tls.Clone() }

// Kafka sets TLS and SASL in sarama's configuration.
func (a *Access) Kafka(c *sarama.Config) {
	if a.tls != nil {
		c.Net.TLS.Enable, c.Net.TLS.Config = true, a.TLS()
	}
	if a.user == "" {
		return
	}
	c.Net.SASL.Enable, c.Net.SASL.User, c.Net.SASL.Password = true, a.user, a.password
	c.Net.SASL.Mechanism = sarama.SASLMechanism(strings.ToUpper(string(a.mechanism)))
	c.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient { return &scram{mechanism: a.mechanism} }
}

// KafkaError adds a hint to an error of a connection, if the broker closed it. A broker
// that wants TLS or a user, and gets neither, closes the connection without an error.
func KafkaError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: the broker closed the connection; it may want --tls or --ca, or --user and --sasl, or none of them", err)
	}
	return err
}

// User returns the user and the password; both are empty without a user.
func (a *Access) User() (name, password string) { return a.user, a.password }

// NATS returns the options for TLS and user of the NATS client.
func (a *Access) NATS() []nats.Option {
	var opts []nats.Option
	if a.tls != nil {
		opts = append(opts, nats.Secure(a.TLS()))
	}
	if a.user != "" {
		opts = append(opts, nats.UserInfo(a.user, a.password))
	}
	return opts
}

// URL returns address with the user and the password, if there is a user.
func (a *Access) URL(address string) (string, error) {
	if a.user == "" {
		return address, nil
	}
	u, err := url.Parse(address)
	if err != nil {
		return "", errors.New("--url: cannot be read") // the text of err may have a password
	}
	u.User = url.UserPassword(a.user, a.password)
	return u.String(), nil
}

// The forms of an address, in words.
const (
	KafkaForm = "host:port,host:port,..."
	NATSForm  = "nats://host:port (or tls, ws, wss)"
	HTTPForm  = "http://user:password@host:port (or https)"
)

// NATSAddress tells whether address is a list of addresses of [NATSForm]. The scheme
// is optional.
func NATSAddress(address string) bool {
	for a := range strings.SplitSeq(address, ",") {
		scheme, _, has := strings.Cut(a, "://")
		if a == "" || has && !slices.Contains([]string{"nats", "tls", "ws", "wss"}, scheme) {
			return false
		}
	}
	return true
}

// HTTPAddress tells whether address is of [HTTPForm].
func HTTPAddress(address string) bool {
	u, err := url.Parse(address)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != ""
}

// KafkaAddress tells whether address is of [KafkaForm].
func KafkaAddress(address string) bool {
	for a := range strings.SplitSeq(address, ",") {
		host, port, err := net.SplitHostPort(a)
		n, portErr := strconv.ParseUint(port, 10, 16)
		if err != nil || portErr != nil || host == "" || n == 0 {
			return false
		}
	}
	return true
}

var userinfo = regexp.MustCompile(`(\w+://)?[^\s"]*@`)

// Redact replaces users and passwords in addresses, also in the text of an error, by
// "...". A NATS address needs no scheme. A password may have slashes and commas, so of a
// list of addresses only the last host stays.
func Redact(text string) string { return userinfo.ReplaceAllString(text, "${1}...@") }
